"""Runs of a tracking store: found by their key, logged once, closed.

Everything is logged from finished results by the one process that holds the store (:func:`tasks.tracking.store.writer`), so
logging again finds the runs and changes nothing: parameters are the same, and MLflow keeps one of two points that are equal in
value, step and time, so points are dated by the run's own start plus their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from pydantic import Field

from kivi.spec import CacheSpec
from tasks.config import Config
from tasks.sanitize import visible
from tasks.tracking.store import TrackingStore

POINTS_A_BATCH = 1000  # MLflow's limit of one log_batch
NOTE_LENGTH = 8000  # MLflow's limit of a tag, and so of a description: it would cut it in a word
ENDED = {"FINISHED", "FAILED"}


class Point(Config):
    """A metric's value at a step; single figures are at step 0."""

    name: str
    value: float
    step: int = 0


class Content(Config):
    """What a run carries when it is done."""

    passed: bool = Field(description="whether the run is FINISHED, else it is FAILED")
    params: dict[str, str] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    points: tuple[Point, ...] = ()
    files: dict[str, str] = Field(default_factory=dict, description="text artefacts by path")
    note: str = Field("", description="the run's description, in Markdown")


class Entry(Content):
    """A finished result of one file, with what its run is found by; it is also tagged with its verdict."""

    name: str
    kind: str = Field(description="the tag kivi.kind")
    digest: str = Field(description="of the result: the tag kivi.result")
    started: datetime


class Logged(Config):
    """Where a result was logged."""

    experiment_id: str
    run_id: str
    child_ids: tuple[str, ...] = ()


def all_runs(
    store: TrackingStore,
    filter_string: str,
    *,
    most: int = 0,
    superseded: bool = False,
    experiments: Sequence[str] = (),
    where: Callable[[Run], bool] | None = None,
) -> list[Run]:
    """Return the runs that match, newest first.

    Args:
        store: The store.
        filter_string: In MLflow's language.
        most: The most runs to return; 0 for all.
        superseded: Return superseded ones, too.
        experiments: Ids of experiments to look in instead of the store's own.
        where: What the runs must be besides, which MLflow's language cannot say.
    """
    runs: list[Run] = []
    token = None
    while True:
        page = store.client.search_runs(
            list(experiments) or [store.experiment_id],
            filter_string=filter_string,
            run_view_type=ViewType.ACTIVE_ONLY,
            order_by=["attributes.start_time DESC"],
            page_token=token,
            **({"max_results": 2 * most} if most else {}),
        )
        standing = (run for run in page if superseded or "kivi.superseded" not in run.data.tags)
        runs.extend(run for run in standing if where is None or where(run))
        token = page.token
        if not token or (most and len(runs) >= most):
            return runs[:most] if most else runs


def search(store: TrackingStore, tags: Mapping[str, str], extra: str = "") -> list[Run]:
    """Return the runs with all of ``tags`` that were not superseded, newest first; ``extra`` is in MLflow's filter language."""
    clauses = [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
    return all_runs(store, " AND ".join([*clauses, *([extra] if extra else [])]))


def log_entry(store: TrackingStore, entry: Entry, parent_id: str = "") -> str:
    """Log one run, or find the one that holds the same result; return its id.

    A run that a killed process left half logged, closed since or not, is brought to its end.

    Args:
        store: The store, held by this process.
        entry: What to log.
        parent_id: The run that this one is a child of.
    """
    parent = {MLFLOW_PARENT_RUN_ID: parent_id} if parent_id else {}
    key = {"kivi.kind": entry.kind, "kivi.result": entry.digest, **parent}
    found = search(store, key)
    run = found[0] if found else start(store, entry.name, entry.started.timestamp(), key)
    run_id: str = run.info.run_id
    close_stale(store, keep=parent_id or run_id)
    if run.info.status not in ENDED:
        reopen(store, run)
        tags = {**entry.tags, "kivi.verdict": "pass" if entry.passed else "fail"}
        fill(store, run, entry.model_copy(update={"tags": tags}))
        close_twins(store, search(store, key), keep=run_id)
    return run_id


def start(store: TrackingStore, name: str, started: float, tags: Mapping[str, str]) -> Run:
    """Make a RUNNING run that began ``started`` seconds after 1970.

    A server's reply may be lost after it made the run, which is then found by its tags and start; :func:`close_twins` ends what
    a repeated request made twice.
    """
    every, start_ms = {**tags, **writer_tag(store)}, int(started * 1000)
    try:
        return store.client.create_run(store.experiment_id, start_time=start_ms, tags=every, run_name=visible(name))
    except MlflowException:
        made = all_runs(store, f"attributes.status = 'RUNNING' AND attributes.start_time = {start_ms}")
        for run in made:
            if every.items() <= run.data.tags.items():
                return run
        raise


def close_twins(store: TrackingStore, runs: Iterable[Run], keep: str) -> list[Run]:
    """Supersede those of ``runs`` that were never ended, but ``keep``, and return the others.

    A request whose reply was lost made them, empty.
    """
    others = []
    for run in runs:
        if run.info.status in ENDED or run.info.run_id == keep:
            others.append(run)
        else:
            supersede(store, run, by=keep)
    return others


def fill(store: TrackingStore, run: Run, content: Content, ended: int | None = None) -> None:
    """Log all that a run carries, and close it; ``ended`` is in ms after 1970, now by default."""
    client, run_id = store.client, run.info.run_id
    client.log_batch(
        run_id,
        params=[Param(name, visible(value)) for name, value in content.params.items()],
        tags=[RunTag(name, visible(value)) for name, value in content.tags.items()],
    )
    log_points(store, run, content.points)
    for path, text in content.files.items():
        client.log_text(run_id, text, path)
    if content.note:
        client.set_tag(run_id, MLFLOW_RUN_NOTE, content.note)
    client.set_terminated(run_id, "FINISHED" if content.passed else "FAILED", end_time=ended)


def log_points(store: TrackingStore, run: Run, points: Iterable[Point]) -> None:
    """Log numbers and curves; a point's time is the run's start plus its step."""
    start_ms = run.info.start_time
    metrics = [Metric(point.name, point.value, start_ms + point.step, point.step) for point in points]
    for first in range(0, len(metrics), POINTS_A_BATCH):
        store.client.log_batch(run.info.run_id, metrics=metrics[first : first + POINTS_A_BATCH])


def shortened(note: str, whole: str) -> str:
    """Return a description that MLflow takes, cut at the end of a line; ``whole`` is the run's file that has all of it."""
    if len(note) <= NOTE_LENGTH:
        return note
    cut = f"\n… the rest is in this run's {whole} under Artifacts."
    kept = note[: NOTE_LENGTH - len(cut)]
    return kept[: kept.rfind("\n") + 1] + cut


def close_stale(store: TrackingStore, keep: str) -> None:
    """Close runs that a process left RUNNING when it died; this process holds the store, so no other is logging."""
    for run in search(store, writer_tag(store), "attributes.status = 'RUNNING'"):
        tags = run.data.tags
        if "kivi.kind" in tags and keep not in {run.info.run_id, tags.get(MLFLOW_PARENT_RUN_ID)}:
            store.client.set_tag(run.info.run_id, "kivi.closed", "the process that logged this run ended before it was done")
            store.client.set_terminated(run.info.run_id, "KILLED")


def reopen(store: TrackingStore, run: Run) -> None:
    """Make a run RUNNING again, to be brought to its end, also one that :func:`close_stale` closed."""
    store.client.update_run(run.info.run_id, status="RUNNING")
    if "kivi.closed" in run.data.tags:
        store.client.delete_tag(run.info.run_id, "kivi.closed")


def supersede(store: TrackingStore, run: Run, by: str) -> None:
    """Say of a run that the run with the id ``by`` takes its place."""
    store.client.set_tag(run.info.run_id, "kivi.superseded", by)
    store.client.update_run(run.info.run_id, name=f"{run.info.run_name} (superseded)")
    if run.info.status == "RUNNING":
        store.client.set_terminated(run.info.run_id, "KILLED")


def writer_tag(store: TrackingStore) -> dict[str, str]:
    """Return the tag that tells this process's runs from those of other machines, where several write."""
    return {"kivi.writer": visible(store.writer).replace("'", "")} if store.writer else {}


def cache_params(spec: CacheSpec) -> dict[str, str]:
    """Return the parameters of a spec, e.g. ``cache.key_bits``, the same names for every kind of cache; else ``none``."""
    fields = spec.model_dump(exclude={"layers", "backend"})  # the backend that ran is the result's own
    names = (name for name in CacheSpec.model_fields if name not in {"layers", "backend"})
    return {f"cache.{name}": str(fields.get(name, "none")) for name in names}
