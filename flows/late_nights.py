"""Nights that come late: after an outage the server starts all that were missed, and only the newest is worth its hours."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext

# A later night that was cancelled or has crashed leaves the earlier one to be the newest.
COUNTS = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.COMPLETED, StateType.FAILED]


def newer_run() -> str | None:
    """Return why the running flow is outdated, or None when it is not.

    It is when a schedule made it, and a later run of the same schedule is due or done. Runs that a person started say nothing
    about each other: they may differ in their parameters, so all of them run; and so does one that a person retries.
    """
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or not run.auto_scheduled or run.expected_start_time is None:
        return None
    due = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=COUNTS)),
        expected_start_time=FlowRunFilterExpectedStartTime(after_=run.expected_start_time, before_=datetime.now(UTC)),
    )
    with get_client(sync_client=True) as client:
        if client.read_flow_run(run.id).run_count > 1:
            return None
        found = client.read_flow_runs(flow_run_filter=due, sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    later = next((other for other in found if other.auto_scheduled and _start(other) > _start(run)), None)
    if later is None:
        return None
    return f"outdated: this night was due at {_start(run)}, and the one due at {_start(later)} takes its place"


def _start(run: FlowRun) -> str:
    return f"{run.expected_start_time:%Y-%m-%d %H:%M:%S} UTC"
