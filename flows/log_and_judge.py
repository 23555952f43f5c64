"""The end of a night: logged, judged, reported. The store may be away for a while; what was measured waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff

from flows.results import NightResult
from tasks.config import NightlyConfig
from tasks.judge.gate import announce, gate
from tasks.paths import REPORTS
from tasks.report.night import publish, report
from tasks.run.night import Night
from tasks.run.result_transfer import between_machines
from tasks.sanitize import redact, visible
from tasks.tracking.baseline import carry_marks, history, mark_good, withdraw_good
from tasks.tracking.nights import find_cells, finish, track
from tasks.tracking.pending_nights import forget, keep, left_over
from tasks.tracking.runs import Logged
from tasks.tracking.store import TrackingError, TrackingStore, writer


def server_is_away(_: Any, __: Any, state: State[Any]) -> bool:
    """Return whether it was the team's server that failed: a folder of this machine does not mend itself."""
    error = state.result(raise_on_failure=False)
    return between_machines() and isinstance(error, TrackingError)


# MLflow's client itself tries a request again for some minutes; these are half an hour more.
@task(
    name="log and judge",
    cache_policy=NO_CACHE,
    retries=5,
    retry_delay_seconds=exponential_backoff(backoff_factor=30),
    retry_condition_fn=server_is_away,
)
def log_and_judge(night: Night, config: NightlyConfig, tracking_dir: Path, refresh: bool) -> NightResult:
    """Log a night, judge and report it; before it, the nights that earlier runs could not log.

    Raises:
        StoreError: the tracking folder cannot be written.
        TrackingError: the store cannot be used; the night is kept, and the next run logs it.
    """
    keep(tracking_dir, night, config)
    try:
        with writer(tracking_dir) as tracking:
            for earlier in left_over(tracking_dir, other_than=night):
                get_run_logger().warning("%s was measured and not logged, which is made good now", earlier.night.title)
                log_one(tracking, earlier.night, earlier.config, tracking_dir, refresh=False)
            return log_one(tracking, night, config, tracking_dir, refresh)
    except MlflowException as error:  # may hold the server's address, and that a password
        raise TrackingError(f"{night.title} is measured and not logged: {redact(error.message)}; run it again") from None


def log_one(tracking: TrackingStore, night: Night, config: NightlyConfig, tracking_dir: Path, refresh: bool) -> NightResult:
    """Log, judge and report one night in an open store."""
    run_id = track(tracking, night, refresh)
    verdict = gate(night, config, history(tracking, night, config.tolerances))
    cell_ids = tuple(run.info.run_id for run in find_cells(tracking, run_id))
    written = report(night, verdict, tracking.experiment_id, run_id, cell_ids)
    page = written.write(tracking_dir / REPORTS)
    files = {"report.html": written.html, "comparison.json": verdict.comparison.model_dump_json(indent=2), **written.figures}
    finish(tracking, run_id, night, verdict, written.note, files)
    if verdict.passed:
        mark_good(tracking, run_id)
    else:
        withdraw_good(tracking, run_id)
    for sentence in carry_marks(tracking, run_id):
        get_run_logger().warning(visible(sentence))
    publish(written, night, verdict, page)
    announce(night, verdict)
    forget(tracking_dir, night)
    logged = Logged(experiment_id=tracking.experiment_id, run_id=run_id, child_ids=cell_ids)
    return NightResult(night=night, verdict=verdict, page=page, logged=logged)
