"""A night as MLflow runs: one parent for the matrix, one child for each cell, found again by their keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

from mlflow.entities import Dataset, DatasetInput, InputTag, Param, Run
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_PARENT_RUN_ID
from prefect import task
from prefect.cache_policies import NO_CACHE

from kivi.measure import perplexity
from kivi.measure.results import CellResult, metric_fields, metric_values
from tasks.judge.gate import Verdict
from tasks.report.figures import cell_figure
from tasks.report.provenance import kept_layers, origin_tags
from tasks.run.night import Night, Outcome, PromptSource, digest
from tasks.sanitize import visible
from tasks.tracking.runs import (
    Content,
    Point,
    cache_params,
    close_stale,
    close_twins,
    fill,
    log_points,
    reopen,
    search,
    shortened,
    start,
    supersede,
)
from tasks.tracking.store import TrackingStore

# Marks of the nights that later ones are compared with; see tasks.tracking.baseline.
BASELINE, PIN = "kivi.baseline", "kivi.pin"
GOOD = "good "  # how the mark of a night that passed its gate begins; one that a person set begins otherwise

TABLE = "generations.json"
TAG_LENGTH = 5000  # MLflow's limit of a tag is 8,000 bytes; an error's end says least
DATASET_DIGEST_LENGTH = 36  # MLflow's limit; the whole digest is a tag
# What the parent carries of its cells, since MLflow's charts show only the parent until it is expanded.
ROLLED_UP = (
    "quality.kl_mean",
    "quality.flip_rate",
    "generation.token_agreement",
    "answers.accuracy",
    "memory.compression",
    "memory.bytes_per_token",
    "memory.bytes_per_token_4096",
    "throughput.prefill_ratio",
    "throughput.decode_ratio",
)


def log_night(store: TrackingStore, night: Night, refresh: bool = False) -> str:
    """Log the parent and all cells of a night; return the parent's run id.

    Runs that hold the same results already are found and left as they are; the parent stays RUNNING until
    :func:`finish_night`. A result that was measured anew gets a new run, and the old one is tagged ``kivi.superseded``.
    A new parent has the pin and the mark by hand of the old one; :func:`tasks.tracking.baseline.carry_marks` gives them to its
    cells.

    Args:
        store: The store, held by this process.
        night: The night; failed cells get a FAILED run with their error.
        refresh: Make a new parent even when the night was logged before.
    """
    parent_id = open_night(store, night, refresh)
    close_stale(store, keep=parent_id)
    for prompts in night.prompt_sets:
        _log_dataset(store, parent_id, prompts)
    sources = {prompts.name: prompts for prompts in night.prompt_sets}
    for outcome in night.outcomes:
        _log_outcome(store, parent_id, outcome, sources.get(outcome.cell.prompt_set))
    return parent_id


def finish_night(
    store: TrackingStore, parent_id: str, night: Night, verdict: Verdict, note: str, files: Mapping[str, str]
) -> None:
    """Give the parent its roll-ups, verdict, description and files, and close it.

    Args:
        store: The store, held by this process.
        parent_id: What :func:`log_night` returned.
        night: The night.
        verdict: The gate's verdict on it.
        note: The parent's description, in Markdown; see :func:`tasks.tracking.runs.shortened`.
        files: Text artefacts by their path.
    """
    run = store.client.get_run(parent_id)
    cells = close_twins(store, find_cells(store, parent_id), keep=parent_id)  # those of this night are all closed by now
    close_twins(store, search(store, {"kivi.kind": "matrix", "kivi.night_key": night.key}), keep=parent_id)
    _log_roll_ups(store, run, night, verdict)
    children = {child.data.tags["kivi.cell_key"]: child.info.run_id for child in cells}
    for outcome in night.outcomes:
        store.client.set_tag(children[outcome.cell.key], "kivi.verdict", verdict.of(outcome.cell.key))
    note = shortened(note, "report.html")
    content = Content(passed=verdict.passed, tags={"kivi.verdict": verdict.word}, files=dict(files), note=note)
    # Who runs a night again of which everything is there changes nothing about how long it took.
    seen_before = all(outcome.reused for outcome in night.outcomes)
    fill(store, run, content, ended=run.info.end_time if seen_before else None)


def find_nights(store: TrackingStore) -> list[Run]:
    """Return the parents, newest first, without those that were superseded."""
    return search(store, {"kivi.kind": "matrix"})


def find_cells(store: TrackingStore, parent_id: str) -> list[Run]:
    """Return the cells of a matrix in the order in which they were measured, without those that were superseded."""
    return search(store, {MLFLOW_PARENT_RUN_ID: parent_id, "kivi.kind": "cell"})[::-1]


def open_night(store: TrackingStore, night: Night, refresh: bool = False) -> str:
    """Return the run id of a night's parent, made or found and RUNNING from now on; see :func:`log_night`."""
    client = store.client
    found = search(store, {"kivi.kind": "matrix", "kivi.night_key": night.key})
    if found and not refresh:
        parent_id: str = found[0].info.run_id
        old = found[1:]
        reopen(store, found[0])
    else:
        started = time.time() - sum(night.seconds.values())  # as MLflow shows it: the measurement, not only the logging
        parent_id = start(store, night.title, started, _night_tags(night)).info.run_id
        old = found
        client.log_batch(parent_id, params=[Param(name, value) for name, value in _night_params(night).items()])
    if night.flow_run_id:
        client.set_tag(parent_id, "prefect.flow_run_id", night.flow_run_id)
    marks = {name: mark for run in reversed(old) for name, mark in chosen_marks(run).items()}
    for name, mark in marks.items():  # before those that have them are superseded, so that no death in between loses them
        client.set_tag(parent_id, name, mark)
    for run in old:
        for cell in find_cells(store, run.info.run_id):
            supersede(store, cell, by=parent_id)
        supersede(store, run, by=parent_id)
    return parent_id


def chosen_marks(run: Run) -> dict[str, str]:
    """Return the marks that a person gave a night, for the night that supersedes it (:mod:`tasks.tracking.baseline`)."""
    marks = {name: run.data.tags.get(name, "") for name in (BASELINE, PIN)}
    return {name: mark for name, mark in marks.items() if mark and not mark.startswith(GOOD)}


def _night_tags(night: Night) -> dict[str, str]:
    shas = sorted({result.provenance.git_sha for result in night.results})
    tags = {"kivi.kind": "matrix", "kivi.night_key": night.key, "kivi.night": visible(night.scheduled)}
    return {**tags, "kivi.git_sha": ", ".join(shas)} if shas else tags


def _night_params(night: Night) -> dict[str, str]:
    cells = [outcome.cell for outcome in night.outcomes]
    named = {
        "model": {cell.model.name for cell in cells},
        "prompt_set": {cell.prompt_set for cell in cells},
        "specs": {cell.spec.slug for cell in cells},
    }
    return {"matrix": visible(night.name), **{name: visible(", ".join(sorted(values))) for name, values in named.items()}}


def _log_outcome(store: TrackingStore, parent_id: str, outcome: Outcome, prompts: PromptSource | None) -> None:
    client, result = store.client, outcome.result
    content = digest((result.model_dump_json(),)) if result is not None else ""
    run = _find_cell(store, parent_id, outcome, content)
    if outcome.error:
        client.set_tag(run.info.run_id, "kivi.error", visible(outcome.error)[:TAG_LENGTH])
    elif "kivi.error" in run.data.tags:
        client.delete_tag(run.info.run_id, "kivi.error")
    if result is None:
        fill(store, run, Content(passed=False, files={"error.txt": outcome.details or outcome.error}))
    elif run.info.status != "FINISHED":  # new, or one that failed before or was left half logged
        if prompts is not None:
            _log_dataset(store, run.info.run_id, prompts)
        # MLflow shows the time from start to end as how long the run took: that of the measurement, not of the logging.
        took = int(1000 * sum(result.provenance.seconds.values()))
        fill(store, run, _content(result, content), ended=run.info.start_time + took)


def _find_cell(store: TrackingStore, parent_id: str, outcome: Outcome, content: str) -> Run:
    """Return the run that holds this very result, or an unfinished one without a result, or a new one."""
    key = {MLFLOW_PARENT_RUN_ID: parent_id, "kivi.cell_key": outcome.cell.key}
    found = search(store, key)
    run = next((run for run in found if run.data.tags.get("kivi.result", "") in {content, ""}), None)
    if run is None:
        started = outcome.result.provenance.started.timestamp() if outcome.result else time.time()
        run = start(store, f"{outcome.cell.spec.slug} {outcome.cell.prompt_set}", started, {"kivi.kind": "cell", **key})
    for old in found:
        if old.info.run_id != run.info.run_id:
            supersede(store, old, by=run.info.run_id)
    return run


def _content(result: CellResult, content: str) -> Content:
    made = result.provenance
    files = {
        "result.json": result.model_dump_json(indent=2),
        "audit.json": result.audit.model_dump_json(indent=2),
        "figures/by_step.svg": cell_figure(result),
    }
    quality = result.quality
    if quality.statistics is not None:
        files["llama-perplexity.txt"] = perplexity.show(
            quality.statistics,
            perplexity=quality.perplexity,
            perplexity_full=quality.perplexity_full,
            flip_rate=quality.flip_rate,
        )
    tags = {
        "kivi.result": content,
        "kivi.prompt_sha256": made.prompt_sha256,
        "kivi.weights_digest": made.weights_digest,
        "kivi.backend_reason": made.backend_reason,
        "kivi.coverage": made.coverage_note,
        **origin_tags(made),
    }
    rows = [continuation.model_dump() for continuation in result.generation.continuations]
    if rows:
        # MLflow's own log_table appends to a table that is there; a whole file in its format does not.
        files[TABLE] = json.dumps({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]})
        tags[MLFLOW_LOGGED_ARTIFACTS] = json.dumps([{"path": TABLE, "type": "table"}])
    return Content(passed=True, params=cell_params(result), tags=tags, points=tuple(_points(result)), files=files)


def cell_params(result: CellResult) -> dict[str, str]:
    """Return the parameters of a cell, the same names for every kind of cache."""
    made = result.provenance
    return {
        "model": made.model,
        "model_revision": made.model_revision,
        "prompt_set": made.prompt_set,
        "spec": result.spec.slug,
        **cache_params(result.spec),
        "layers_quantized": str(made.layers_quantized),
        "layers_kept": kept_layers(made),
        "backend": made.backend,
        "dtype": made.model_dtype,
        "device": made.device,
    }


def _points(result: CellResult) -> Iterator[Point]:
    """Yield every number and every curve of a result."""
    for name, value in metric_values(result):
        yield Point(name=name, value=value)
    curves = {
        "quality.logit_cosine": result.generation.logit_cosine,
        "generation.logit_cosine_free": result.generation.logit_cosine_free,
        "quality.step_kl": result.generation.step_kl,
    }
    for name, curve in curves.items():
        for step, value in enumerate(curve):
            yield Point(name=name, value=value, step=step)
    for bucket in result.quality.by_depth:
        yield Point(name="quality.kl_by_depth", value=bucket.kl_mean, step=bucket.start)


def _log_dataset(store: TrackingStore, run_id: str, prompts: PromptSource) -> None:
    dataset = Dataset(
        name=visible(prompts.name),
        digest=prompts.sha256[:DATASET_DIGEST_LENGTH],
        source_type="prompt_set",
        source=visible(prompts.source),
        profile=None if prompts.rows is None else f'{{"num_rows": {prompts.rows}}}',
    )
    tags = [InputTag("mlflow.data.context", "evaluation"), InputTag("kivi.prompt_sha256", prompts.sha256)]
    store.client.log_inputs(run_id, datasets=[DatasetInput(dataset, tags)])


def _log_roll_ups(store: TrackingStore, run: Run, night: Night, verdict: Verdict) -> None:
    """Log the worst value of each cache over models and prompt sets; once for the same outcome.

    When a failed cell was run again the outcome differs: its points get the next step, which is the one that MLflow shows.
    """
    values = dict(roll_ups(night, verdict))
    content = digest(f"{name}={value!r}" for name, value in sorted(values.items()))
    if run.data.tags.get("kivi.rolled_up", "").partition(" ")[2] == content:
        return
    attempt = int(run.data.tags.get("kivi.rolled_up", "-1 ").partition(" ")[0]) + 1
    log_points(store, run, (Point(name=name, value=value, step=attempt) for name, value in values.items()))
    store.client.set_tag(run.info.run_id, "kivi.rolled_up", f"{attempt} {content}")


def roll_ups(night: Night, verdict: Verdict) -> Iterator[tuple[str, float]]:
    """Yield what a parent carries: counts, and the worst value of each cache as e.g. ``quality.kl_mean/kivi-k2v2-g32``."""
    yield "cells.total", float(len(night.outcomes))
    yield "cells.failed", float(len(night.outcomes) - len(night.results))
    yield "cells.passed", float(sum(verdict.of(outcome.cell.key) == "pass" for outcome in night.outcomes))
    yield "verdict.passed", float(verdict.passed)
    better = {field.name: field.higher_is_better for field in metric_fields()}
    for name in ROLLED_UP:
        by_spec: dict[str, list[float]] = {}
        for result in night.results:
            value = dict(metric_values(result)).get(name)
            if value is not None:
                by_spec.setdefault(result.spec.slug, []).append(value)
        for slug, values in by_spec.items():
            yield f"{name}/{slug}", min(values) if better[name] else max(values)


track = task(name="track", cache_policy=NO_CACHE)(log_night)
finish = task(name="close the night", cache_policy=NO_CACHE)(finish_night)
