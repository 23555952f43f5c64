"""Which earlier night a night is compared with: the last good one of the same identity, and the pinned one.

A cell's identity is what must be equal for two results to be comparable (:func:`identity`). What was chosen is in MLflow's
tags, on the parent and on its cells, so that a person sees it and any machine with the store finds it:

- ``kivi.baseline``: ``good TIME`` on a night that passed its gate, ``set TIME`` on one that a person chose;
  the latest mark counts, so each good night takes the place of the one before.
- ``kivi.pin``: ``TIME`` on a night that stays until another is pinned, because "last good" drifts by what is tolerated.
- ``kivi.identity`` on the cells, by which they are found.

A night that is measured anew takes over the pin and the mark by hand of the one that it supersedes.

A night that is gated again, because it was resumed, is compared as the first time: with nights that began before it, so never
with itself, also where it was set or pinned since.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field, ValidationError

from kivi.measure.results import CellResult
from tasks.config import Config, Tolerances
from tasks.judge.regression import Comparison, Pair, compare
from tasks.run.night import AD_HOC, Night, digest
from tasks.run.plan import content_hash
from tasks.tracking.nights import BASELINE, GOOD, PIN, chosen_marks, find_cells, find_nights
from tasks.tracking.runs import all_runs
from tasks.tracking.store import TrackingStore

IDENTITY = "kivi.identity"
RESULT_FILE = "result.json"
SPACES = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')  # outside of strings: the tag is the digest of the result without them
CANDIDATES = 5  # good nights that are tried, when the result of the latest cannot be read


class BaselineError(RuntimeError):
    """A night that cannot be a baseline; one sentence says why and what to do."""


class Marked(Config):
    """A night that was marked, for people: what was asked for, and which cells could not be."""

    run_id: str
    night: str
    mark: str
    cells: int
    left_out: tuple[str, ...] = Field((), description="a sentence for each cell that is no baseline")


class Chosen(NamedTuple):
    """A cell's baseline as it is found: its run, what it is called in sentences, and its result."""

    run: Run
    name: str
    result: CellResult


def identity(result: CellResult) -> str:
    """Return the content hash of what two results must share to be compared.

    The model's weights and dtype, the prompts' rows, the spec with its backend, how much was measured, and the class of
    device with its BLAS. Not the versions of code and packages: their changes are what a comparison is to find.
    """
    made = result.provenance
    return content_hash(
        {
            "model": [made.weights_digest, made.model_dtype],
            "prompts": made.prompt_sha256,
            "spec": made.spec.model_dump(mode="json"),
            "measure": made.settings.model_dump(mode="json", exclude={"deadline_s", "seed"}),
            "device": [made.device, made.blas],
        }
    )


def against_history(store: TrackingStore, night: Night, tolerances: Tolerances) -> Comparison:
    """Compare a night's results with the last good night and with the pinned one.

    A cell that has neither is named in the notes: thresholds alone judge it.
    """
    pairs: list[Pair] = []
    notes: list[str] = []
    alone: list[str] = []
    measured = [(outcome.cell.label, outcome.result) for outcome in night.outcomes if outcome.result is not None]
    for label, result in measured:
        found = list(_baselines(store, result, notes))
        pairs += [Pair(label, chosen.name, result, chosen.result) for chosen in found]
        if not found:
            alone.append(label)
    if alone:
        who = "any cell" if len(alone) == len(measured) else ", ".join(alone)
        notes.append(f"no baseline yet for {who}: thresholds alone judge")
    return compare(pairs, tolerances, notes)


history = task(name="compare with history", cache_policy=NO_CACHE)(against_history)


def mark_good(store: TrackingStore, parent_id: str) -> None:
    """Make a night that passed its gate the last good one. One that has a mark keeps it, so that resuming changes nothing."""
    mark = store.client.get_run(parent_id).data.tags.get(BASELINE) or f"{GOOD}{_now()}"
    _mark(store, parent_id, BASELINE, mark)


def withdraw_good(store: TrackingStore, parent_id: str) -> None:
    """Take the mark of a good night off one that does not pass any more. What a person set stays."""
    for run in (*find_cells(store, parent_id), store.client.get_run(parent_id)):
        if run.data.tags.get(BASELINE, "").startswith(GOOD):
            store.client.delete_tag(run.info.run_id, BASELINE)


def carry_marks(store: TrackingStore, parent_id: str) -> list[str]:
    """Give a night's marks by hand to its cells that were measured anew; return a sentence for each that cannot have them."""
    sentences = []
    for tag, mark in chosen_marks(store.client.get_run(parent_id)).items():
        try:
            left_out: Sequence[str] = _mark(store, parent_id, tag, mark).left_out
        except BaselineError as error:
            left_out = [str(error)]
        sentences += [f"{tag}: {sentence}" for sentence in left_out]
    return sentences


def set_baseline(store: TrackingStore, night: str) -> Marked:
    """Make a finished night the baseline by hand, also one that did not pass.

    Args:
        store: The store, held by this process.
        night: Its run id, or what it is called (its scheduled start), or ``last``: the newest that was no ad-hoc evaluation.

    Raises:
        BaselineError: there is no such night, or none of its cells can be a baseline.
    """
    return _mark(store, find_night(store, night).info.run_id, BASELINE, f"set {_now()}")


def pin_baseline(store: TrackingStore, night: str) -> Marked:
    """Pin a finished night; see :func:`set_baseline`."""
    return _mark(store, find_night(store, night).info.run_id, PIN, _now())


def unpin(store: TrackingStore) -> int:
    """Remove all pins; return from how many nights."""
    runs = list(all_runs(store, f"tags.`{PIN}` LIKE '%'"))
    for run in runs:
        store.client.delete_tag(run.info.run_id, PIN)
    return sum(run.data.tags.get("kivi.kind") == "matrix" for run in runs)


def find_night(store: TrackingStore, night: str) -> Run:
    """Return the parent run of a finished night.

    Raises:
        BaselineError: there is none of that name, several, or it is not finished.
    """
    nights = find_nights(store)
    planned = [run for run in nights if run.data.params.get("matrix") not in AD_HOC]
    found = planned[:1] if night == "last" else [run for run in nights if night in _names(run)]
    if not found:
        known = ", ".join(run.info.run_name for run in nights[:5])
        if not known:
            raise BaselineError(f"{night!r}: no night was logged here yet; `kivi nightly` makes one")
        why = "no night was planned here" if night == "last" else "no such night"
        raise BaselineError(f"{night!r}: {why}; the newest are {known}: give a run id or its scheduled start")
    if len(found) > 1:
        which = ", ".join(f"{run.info.run_name} ({run.info.run_id})" for run in found)
        raise BaselineError(f"{night!r} is the name of {len(found)} nights: {which}; give a run id")
    if found[0].info.status not in {"FINISHED", "FAILED"}:
        raise BaselineError(f"{found[0].info.run_name} is {found[0].info.status}, not finished: run it again, then mark it")
    return found[0]


def marked_nights(store: TrackingStore) -> list[Marked]:
    """Return the nights that are compared with now: for each identity the baseline and the pin."""
    serving: dict[tuple[str, str], int] = {}
    for tag in (BASELINE, PIN):
        for run in serving_cells(store, tag):
            key = (run.data.tags[MLFLOW_PARENT_RUN_ID], f"{tag} {run.data.tags[tag]}")
            serving[key] = serving.get(key, 0) + 1
    return [
        Marked(run_id=parent, night=str(store.client.get_run(parent).info.run_name), mark=mark, cells=cells)
        for (parent, mark), cells in serving.items()
    ]


def serving_cells(store: TrackingStore, tag: str) -> list[Run]:
    """Return the cells that are compared with now: for each identity the one that was marked last."""
    latest: dict[str, Run] = {}
    marked = all_runs(store, f"tags.`{tag}` LIKE '%' AND tags.`kivi.kind` = 'cell'")
    for run in sorted(marked, key=lambda run: _time(run, tag), reverse=True):
        if run.data.tags[IDENTITY] not in latest and _night_of(store, run) is not None:
            latest[run.data.tags[IDENTITY]] = run
    return list(latest.values())


def _night_of(store: TrackingStore, cell: Run) -> Run | None:
    """Return a cell's parent, or nothing where it was deleted in MLflow, which leaves its cells as they are."""
    try:
        parent = store.client.get_run(cell.data.tags[MLFLOW_PARENT_RUN_ID])
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            raise
        return None
    return parent if parent.info.lifecycle_stage == LifecycleStage.ACTIVE else None


def _baselines(store: TrackingStore, result: CellResult, notes: list[str]) -> Iterator[Chosen]:
    started = int(result.provenance.started.timestamp() * 1000)
    earlier = f"tags.`{IDENTITY}` = '{identity(result)}' AND attributes.start_time < {started}"

    def marked(tag: str, mark: str, most: int = 0) -> list[Run]:
        clauses = f"{earlier} AND tags.`{tag}` LIKE '{mark}'"
        return all_runs(store, clauses, most=most, where=lambda run: _night_of(store, run) is not None)

    good, by_hand = marked(BASELINE, f"{GOOD}%", most=CANDIDATES), marked(BASELINE, "set %")
    latest = sorted([*good, *by_hand], key=lambda run: _time(run, BASELINE), reverse=True)
    pinned = sorted(marked(PIN, "%"), key=lambda run: _time(run, PIN), reverse=True)
    for name, runs in (("the last good night", latest), ("the pinned night", pinned[:1])):
        chosen = _first_readable(store, name, runs, notes)
        if chosen is not None:
            yield chosen


def _first_readable(store: TrackingStore, name: str, runs: Iterable[Run], notes: list[str]) -> Chosen | None:
    for run in runs:
        night = store.client.get_run(run.data.tags[MLFLOW_PARENT_RUN_ID]).data.tags.get("kivi.night", "")
        try:
            return Chosen(run, f"{name} {night}", read_result(store, run))
        except BaselineError as error:
            notes.append(f"{name} {night} is passed over: {error}")
    return None


def read_result(store: TrackingStore, run: Run) -> CellResult:
    """Read a cell's result back from its run.

    Raises:
        BaselineError: the file is missing, not as it was logged, or not a result of this version.
    """
    where = f"{RESULT_FILE} of run {run.info.run_id}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            content = Path(store.client.download_artifacts(run.info.run_id, RESULT_FILE, folder)).read_text(encoding="utf-8")
        if run.data.tags.get("kivi.result", "") != digest((SPACES.sub(r"\1", content),)):
            raise BaselineError(f"{where} is not as it was logged: the run's tag kivi.result is the digest of another")
        return CellResult.model_validate_json(content)
    except (MlflowException, OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"{where} cannot be read: {error}") from None
    except ValidationError as error:
        raise BaselineError(f"{where} is not a result of this version: {error.errors()[0]['msg']}") from None


def _mark(store: TrackingStore, parent_id: str, tag: str, mark: str) -> Marked:
    parent = store.client.get_run(parent_id)
    able, left_out = [], []
    for run in find_cells(store, parent_id):
        obstacle, result = _why_not(store, run)
        if result is None:
            left_out.append(f"{run.info.run_name}: {obstacle}")
        else:
            able.append((run, result))
    if not able:
        raise BaselineError(f"{parent.info.run_name} has no cell that could be a baseline: {'; '.join(left_out) or 'no cells'}")
    for run, result in able:
        store.client.set_tag(run.info.run_id, IDENTITY, identity(result))
        store.client.set_tag(run.info.run_id, tag, mark)
    store.client.set_tag(parent_id, tag, mark)
    name = str(parent.info.run_name)
    return Marked(run_id=parent_id, night=name, mark=f"{tag} {mark}", cells=len(able), left_out=tuple(left_out))


def _why_not(store: TrackingStore, run: Run) -> tuple[str, CellResult | None]:
    """Return a cell's result, or why it is no baseline."""
    if run.info.status != "FINISHED":
        return f"it is {run.info.status}", None
    try:
        result = read_result(store, run)
    except BaselineError as error:
        return str(error), None
    return ("", result) if result.audit.passed else ("its cache failed the audit, and what lies is no baseline", None)


def _time(run: Run, tag: str) -> str:
    return str(run.data.tags[tag]).rpartition(" ")[2]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _names(run: Run) -> Sequence[str]:
    return run.info.run_id, run.info.run_name, run.data.tags.get("kivi.night", "")
