"""Retention: the artefacts of old nights go, their metrics, parameters and tags stay, so trends reach back for years.

A night that is compared with, as the baseline or the pin of some cell, keeps everything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlparse

from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from pydantic import Field

from tasks.config import Config
from tasks.paths import ARTIFACTS
from tasks.tracking.baseline import serving_cells
from tasks.tracking.nights import BASELINE, PIN
from tasks.tracking.runs import all_runs
from tasks.tracking.store import TrackingError, TrackingStore

PRUNED = "kivi.pruned"


class Pruned(Config):
    """What a pruning removed, or would remove."""

    older_than: datetime
    runs: tuple[str, ...] = Field(description="run ids whose artefacts went")
    bytes: int = Field(description="what they took on disk")
    kept: tuple[str, ...] = Field(description="a sentence for each old night that stays")
    dry_run: bool


def prune(store: TrackingStore, keep_days: int, *, dry_run: bool = False, now: datetime | None = None) -> Pruned:
    """Remove the artefacts of runs that began more than ``keep_days`` days ago; tag the runs ``kivi.pruned``.

    Args:
        store: The store, held by this process.
        keep_days: Days that every night keeps its artefacts.
        dry_run: Remove nothing, say what would be.
        now: The present, the clock's by default.

    Raises:
        TrackingError: a folder cannot be removed, or is outside the store.
    """
    limit = (now or datetime.now(UTC)) - timedelta(days=keep_days)
    serving = {run.data.tags[MLFLOW_PARENT_RUN_ID]: tag for tag in (BASELINE, PIN) for run in serving_cells(store, tag)}
    removed, freed, kept = [], 0, []
    for run in _old_runs(store, limit):
        night = run.data.tags.get(MLFLOW_PARENT_RUN_ID, run.info.run_id)
        if night in serving:
            if night == run.info.run_id:
                what = "pinned" if serving[night] == PIN else "the baseline"
                kept.append(f"{run.info.run_name} is {what} for some cell")
            continue
        folder = _artifact_folder(store, run)
        freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        removed.append(run.info.run_id)
        if not dry_run:
            _remove(store, run, folder)
    return Pruned(older_than=limit, runs=tuple(removed), bytes=freed, kept=tuple(kept), dry_run=dry_run)


def _old_runs(store: TrackingStore, limit: datetime) -> Iterator[Run]:
    """Yield the finished runs from before ``limit`` that still have artefacts, of all flows, superseded ones too."""
    experiments = [experiment.experiment_id for experiment in store.client.search_experiments()]
    before = f"attributes.start_time < {int(limit.timestamp() * 1000)}"
    for run in all_runs(store, before, superseded=True, experiments=experiments):
        if "kivi.kind" in run.data.tags and PRUNED not in run.data.tags and run.info.status != "RUNNING":
            yield run


def _artifact_folder(store: TrackingStore, run: Run) -> Path:
    """Return where a run's artefacts are, after making sure that it is a folder of this store."""
    root = (store.directory / ARTIFACTS).resolve()
    folder = Path(unquote(urlparse(run.info.artifact_uri).path)).resolve()
    if root not in folder.parents:
        raise TrackingError(f"{folder}: artefacts of {run.info.run_name} are not in {root}; prune the store where they are")
    return folder


def _remove(store: TrackingStore, run: Run, folder: Path) -> None:
    """Remove a run's folder, then say so on the run: a process that dies in between removes nothing the next time."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise TrackingError(f"{folder}: cannot be removed: {error.strerror or error}; mend its permissions") from None
    store.client.set_tag(run.info.run_id, PRUNED, datetime.now(UTC).isoformat(timespec="seconds"))
