"""A finished result as an MLflow run, found again by its content: logging it twice changes nothing.

For flows whose result is one file. A night, which is resumed and superseded, has :mod:`tasks.tracking.nights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from pydantic import Field

from tasks.config import Config
from tasks.sanitize import visible
from tasks.tracking.nights import POINTS_A_BATCH, close_stale, reopen, shortened, writer_tag
from tasks.tracking.runs import search
from tasks.tracking.store import TrackingStore


class Point(Config):
    """A metric's value at a step; single figures are at step 0."""

    name: str
    value: float
    step: int = 0


class Entry(Config):
    """One run: what it is found by, and everything that it carries."""

    name: str
    kind: str = Field(description="the tag kivi.kind")
    content: str = Field(description="digest of the result: the tag kivi.result")
    started: datetime
    passed: bool
    params: dict[str, str]
    tags: dict[str, str] = Field(default_factory=dict)
    points: tuple[Point, ...] = ()
    files: dict[str, str] = Field(default_factory=dict, description="text artefacts by path")
    note: str = Field("", description="the run's description, in Markdown")


class Logged(Config):
    """Where a result was logged."""

    experiment_id: str
    run_id: str
    child_ids: tuple[str, ...] = ()


def log_entry(store: TrackingStore, entry: Entry, parent_id: str = "") -> str:
    """Log one run, or find the one that holds the same content; return its id.

    A run that a killed process left half logged, closed since or not, is brought to its end: parameters are the same, and
    MLflow keeps one of two points that are equal in value, step and time, so points are dated by the run's start plus their
    step.

    Args:
        store: The store, held by this process.
        entry: What to log.
        parent_id: The run that this one is a child of.
    """
    run = _find(store, entry, parent_id)
    run_id: str = run.info.run_id
    close_stale(store, keep=parent_id or run_id)
    client = store.client
    if run.info.status in {"FINISHED", "FAILED"}:
        return run_id
    reopen(store, run)
    client.log_batch(
        run_id,
        params=[Param(name, visible(value)) for name, value in entry.params.items()],
        tags=[RunTag(name, visible(value)) for name, value in {**entry.tags, "kivi.verdict": _word(entry)}.items()],
    )
    start = run.info.start_time
    points = [Metric(point.name, point.value, start + point.step, point.step) for point in entry.points]
    for first in range(0, len(points), POINTS_A_BATCH):
        client.log_batch(run_id, metrics=points[first : first + POINTS_A_BATCH])
    for path, text in entry.files.items():
        client.log_text(run_id, text, path)
    if entry.note:
        client.set_tag(run_id, MLFLOW_RUN_NOTE, shortened(entry.note, "Markdown file"))
    client.set_terminated(run_id, "FINISHED" if entry.passed else "FAILED")
    return run_id


def find_entries(store: TrackingStore, kind: str, parent_id: str = "") -> list[Run]:
    """Return the runs of one kind, newest first, those of one parent if it is given."""
    return search(store, {"kivi.kind": kind, **_parent(parent_id)})


def _find(store: TrackingStore, entry: Entry, parent_id: str) -> Run:
    tags = {"kivi.kind": entry.kind, "kivi.result": entry.content, **_parent(parent_id)}
    found = search(store, tags)
    if found:
        return found[0]
    started = int(entry.started.timestamp() * 1000)
    return store.client.create_run(
        store.experiment_id, start_time=started, tags={**tags, **writer_tag(store)}, run_name=visible(entry.name)
    )


def _parent(parent_id: str) -> Mapping[str, str]:
    return {MLFLOW_PARENT_RUN_ID: parent_id} if parent_id else {}


def _word(entry: Entry) -> str:
    return "pass" if entry.passed else "fail"
