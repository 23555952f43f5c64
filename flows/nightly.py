"""The nightly regression: the cells of a matrix, measured, tracked, gated and reported; the flow's state is the verdict."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.states import Cancelled

from flows.matrix import run_matrix
from flows.results import NightResult
from tasks.config import NightlyConfig, load_config
from tasks.run.plan import check_thresholds

STANDARD = load_config(Path(__file__).parent / "configs" / "nightly.yaml")
# States of a later night that takes the place of an earlier one. One that was cancelled or has crashed does not.
TAKES_PLACE = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.COMPLETED, StateType.FAILED]


@flow(name="nightly", flow_run_name="{config.name}", persist_result=False, validate_parameters=True)
def nightly(config: NightlyConfig = STANDARD, tracking_dir: Path = Path("mlruns"), refresh: bool = False) -> State[NightResult]:
    """Measure a matrix of models, prompt sets and caches against each model's full-precision cache.

    The state is Completed when every cell passed its limits and Failed otherwise, with the verdict as message. Run again
    on the same night it finds what is finished and measures what is not. A run that comes late, when a later one of its
    schedule is due already, is Cancelled.

    Args:
        config: The matrix, how much is measured, and what passes; the standard one by default.
        tracking_dir: Folder of the MLflow store, of finished results and of reports.
        refresh: Measure everything anew; runs of before are tagged as superseded.

    Raises:
        ConfigError: a limit is for no cache of the matrix.
    """
    if outdated := newer_run():
        return Cancelled(message=outdated)
    check_thresholds(config)
    return run_matrix(config, tracking_dir, refresh)


def newer_run() -> str:
    """Return why the running flow is outdated, and nothing when it is not.

    After an outage the server starts all nights that were missed. A run that a schedule made is outdated when a later run of
    the same schedule is due or done. Runs that a person started or retries are never outdated: their parameters may differ.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or not run.auto_scheduled or run.expected_start_time is None:
        return ""
    due = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=TAKES_PLACE)),
        expected_start_time=FlowRunFilterExpectedStartTime(after_=run.expected_start_time, before_=datetime.now(UTC)),
    )
    with get_client(sync_client=True) as client:
        if client.read_flow_run(run.id).run_count > 1:
            return ""
        found = client.read_flow_runs(flow_run_filter=due, sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    later = next((other for other in found if other.auto_scheduled and _start(other) > _start(run)), None)
    if later is None:
        return ""
    return f"outdated: this night was due at {_start(run)}, and the one due at {_start(later)} takes its place"


def _start(run: FlowRun) -> str:
    return f"{run.expected_start_time:%Y-%m-%d %H:%M:%S} UTC"
