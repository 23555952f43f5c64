"""Run the cells of a night as Prefect tasks: find the finished result by its key, or measure it and write it down.

One measurement at a time has the host's accelerator. Whoever wants to see progress says so with :func:`watch`::

    with watch(lambda label, stage, done, total: bar.update(...)):
        run_cell(cell, prompts, store)
"""

from __future__ import annotations

import faulthandler
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from kivi.measure.cell import measure_cell
from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import CellResult
from kivi.measure.speed.throughput import measure_throughput
from kivi.models import LoadedModel, load_model
from kivi.models.embedded import cache_dir
from tasks.config import ModelConfig
from tasks.prompts.prompt_sets import PromptSet
from tasks.run.accelerator import accelerator
from tasks.run.plan import Cell, content_hash
from tasks.run.result_files import Result, ResultStore, StoreError, ThroughputResult
from tasks.sanitize import redact

Progress = Callable[[str, str, int, int], None]

LEAST_GRACE_S = 60.0  # beyond the deadline, for loading the model and for a step that is only slow
STDERR = 2
ARTIFACT_S = 5.0  # between two updates of Prefect's progress artifact, each a request to the server
GB = 1_000_000_000

_progress: ContextVar[Progress | None] = ContextVar("progress", default=None)
_loading = threading.Lock()


class CellError(RuntimeError):
    """A cell that failed; the message begins with its label."""


class Finished(NamedTuple):
    """A cell's result, and whether an earlier run had measured it."""

    result: CellResult
    reused: bool


class Timed(NamedTuple):
    """Results with their throughput, by cell key, and a sentence for each cell that could not be timed."""

    results: dict[str, CellResult]
    failed: dict[str, str]
    reused: bool


@contextmanager
def watch(progress: Progress) -> Iterator[None]:
    """Have ``progress(label, stage, done, total)`` called by the cells that run in this context.

    Contexts are inherited by tasks that Prefect runs in this process, submitted ones included. The calls come from the
    measuring thread, several a second: do little in them.
    """
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


@task(name="cell", task_run_name="{cell.label}", retries=0, persist_result=False, cache_policy=NO_CACHE)
def run_cell(cell: Cell, prompts: PromptSet, store: ResultStore, *, reference_gb: float = 8, refresh: bool = False) -> Finished:
    """Return the result of ``cell``: from ``store``, or measured now and stored.

    Args:
        cell: What to measure.
        prompts: Its prompt set.
        store: Where finished results are.
        reference_gb: Disk for the full cache's logits, which the cells of a model share.
        refresh: Measure even when there is a result.

    Raises:
        CellError: it failed, or ran past its deadline.
        StoreError: the result could not be kept.
    """

    def measure() -> CellResult:
        model = loaded_model(cell.model)
        return measure_cell(
            model,
            prompts.texts(model.tokenizer),
            cell.spec,
            cell.settings,
            cell_key=cell.key,
            prompt_set=prompts.name,
            prompt_sha256=prompts.sha256,
            references=references(cache_dir() / "references", reference_gb),
            monitor=Monitor(Reporter(cell.label, cell.key), cell.settings.deadline_s),
            questions=prompts.questions() if cell.settings.answers is not None else (),
        )

    deadline = cell.settings.deadline_s
    finished, reused = found_or_measured(store, cell.key, CellResult, cell.label, measure, deadline_s=deadline, refresh=refresh)
    if reused:
        _logger().info("%s: found, measured at %s", cell.label, finished.provenance.started)
    return Finished(finished, reused)


@task(name="throughput", task_run_name="throughput of {label}", retries=0, persist_result=False, cache_policy=NO_CACHE)
def run_throughput(
    label: str, cells: Sequence[Cell], prompts: PromptSet, store: ResultStore, *, refresh: bool = False
) -> Timed:
    """Time the caches of finished cells interleaved, and add to each cell's result its throughput.

    Args:
        label: What a person reads, e.g. ``embedded × humaneval``.
        cells: Cells of one model and prompt set whose results are in ``store``.
        prompts: Their prompt set.
        store: Where finished results are.
        refresh: Time them even when there are timings of just these cells.

    Raises:
        CellError: the timing failed as a whole, or ran past the cells' deadlines together.
        StoreError: a result could not be kept.
    """
    key, name, settings = throughput_key(cells), f"throughput of {label}", cells[0].settings
    deadline = sum(cell.settings.deadline_s for cell in cells)

    def measure() -> ThroughputResult:
        model = loaded_model(cells[0].model)
        monitor = Monitor(Reporter(name, key), deadline)
        specs, texts = [cell.spec for cell in cells], prompts.texts(model.tokenizer)
        arms = measure_throughput(model, texts, specs, settings.throughput, monitor=monitor, seed=settings.seed)
        return ThroughputResult(cell_key=key, arms=arms)

    timings, reused = found_or_measured(store, key, ThroughputResult, name, measure, deadline_s=deadline, refresh=refresh)
    return _merge(cells, timings, store, reused)


def throughput_key(cells: Sequence[Cell]) -> str:
    """Return the key of the timings of just these cells."""
    return "throughput-" + content_hash(sorted(cell.key for cell in cells))


def _merge(cells: Sequence[Cell], timings: ThroughputResult, store: ResultStore, reused: bool) -> Timed:
    results, failed = {}, {}
    for cell in cells:
        result = store.read(cell.key, CellResult)
        if result is None:
            raise CellError(f"{cell.label}: its result is gone from {str(store.folder)!r}: run the cell again")
        throughput = timings.arms[cell.spec.slug]
        if isinstance(throughput, str):
            failed[cell.key] = f"{cell.label}: {throughput}"
            continue
        if result.throughput != throughput:
            result = result.model_copy(update={"throughput": throughput})
            store.write(result)
        results[cell.key] = result
    return Timed(results, failed, reused)


def loaded_model(config: ModelConfig) -> LoadedModel:
    """Return a model, loaded once a process; one at a time is kept, since models are large.

    Raises:
        ModelError: it cannot be loaded.
    """
    with _loading:
        return _load(config)


@functools.lru_cache(maxsize=1)
def _load(config: ModelConfig) -> LoadedModel:
    return load_model(config.name, revision=config.revision, dtype=config.dtype)


@functools.cache  # one for the process: it knows what this run still needs
def references(folder: Path, gigabytes: float) -> ReferenceStore:
    """Return the store of the full cache's logits in ``folder``."""
    return ReferenceStore(folder, int(gigabytes * GB))


def found_or_measured(
    store: ResultStore,
    key: str,
    kind: type[Result],
    label: str,
    measure: Callable[[], Result],
    *,
    deadline_s: float | None = None,
    refresh: bool = False,
) -> tuple[Result, bool]:
    """Return the result called ``key``, and whether it was there; else it is measured with the accelerator held, and stored.

    After the wait for the accelerator the store is looked into again: another run may have measured it meanwhile.

    Args:
        store: Where results are kept.
        key: The result's key.
        kind: What it is.
        label: What people call it.
        measure: Measures it; a deadline that it makes counts from when the accelerator is held.
        deadline_s: The same deadline, for :func:`holding`.
        refresh: Measure even when there is a result.

    Raises:
        CellError: it failed.
        StoreError: the result could not be kept.
    """
    found = None if refresh else store.read(key, kind, label)
    if found is None:
        with holding(label, deadline_s):
            found = None if refresh else store.read(key, kind, label)
            if found is None:
                result = measure()
                store.write(result)
                return result, False
    return found, True


@contextmanager
def holding(label: str, deadline_s: float | None = None) -> Iterator[None]:
    """Hold the accelerator; what does not end ends the process long after its deadline.

    Raises:
        CellError: whatever stopped what was done meanwhile; a person must read which measurement it was.
        StoreError: as it was raised meanwhile; it is of the folder, and no measurement's.
    """
    try:
        with accelerator(label, log=_logger().info), _watchdog(deadline_s):
            yield
    except StoreError:
        raise
    except Exception as error:
        raise CellError(f"{label}: {redact(str(error)) or type(error).__name__}") from error


@contextmanager
def _watchdog(deadline_s: float | None) -> Iterator[None]:
    """End the process at twice the deadline, if there is one; the kernel then frees the accelerator.

    Deadlines are looked at between steps, and a step may never end, as under a limit of memory. This is a thread of C, which
    needs no lock of Python's.
    """
    if deadline_s is None:
        yield
        return
    faulthandler.dump_traceback_later(deadline_s + max(deadline_s, LEAST_GRACE_S), exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Reporter:
    """Passes progress on: to whoever watches at once, to Prefect's artifact now and then."""

    def __init__(self, label: str, key: str) -> None:
        self._label = label
        self._watcher = _progress.get()
        self._artifact = _Artifact(label, key) if TaskRunContext.get() is not None else None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._watcher is not None:
            self._watcher(self._label, stage, done, total)
        if self._artifact is not None:
            self._artifact.show(stage, done, total)


class _Artifact:
    """Prefect's progress artifact of one cell: a bar that starts again with each stage, whose name it shows."""

    def __init__(self, label: str, key: str) -> None:
        self._label = label
        self._key = f"cell-{key}"
        self._id: UUID | None = None
        self._due = time.monotonic() + ARTIFACT_S  # what is over sooner needs no bar

    def show(self, stage: str, done: int, total: int) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + ARTIFACT_S
        progress, description = 100 * done / max(1, total), f"{self._label}: {stage}, {done} of {total}"
        try:
            if self._id is None:
                created: Any = create_progress_artifact(progress=progress, key=self._key, description=description)
                self._id = created
            else:
                update_progress_artifact(artifact_id=self._id, progress=progress, description=description)
        except Exception as error:  # the server may be away for a while, which is no reason to lose a measurement
            self._due = time.monotonic() + 12 * ARTIFACT_S
            _logger().warning("%s: Prefect does not take the progress: %s", self._label, error)


def _logger() -> Any:
    return get_run_logger() if TaskRunContext.get() is not None else logging.getLogger(__name__)
