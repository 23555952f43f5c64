"""A night as MLflow runs: one parent for the matrix, one child for each cell, found again by their keys.

Everything is logged from finished results, by the one process that holds the store (:func:`tasks.tracking.store.writer`),
so logging again finds the runs and changes nothing: parameters are the same, and MLflow keeps one of two points that are
equal in value, step and time, so points are dated by the run's own start plus their step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE
from prefect import task
from prefect.cache_policies import NO_CACHE

from kivi.measure.results import CellResult, metric_fields, metric_values
from tasks.judge.gate import Verdict
from tasks.report.figures import cell_figure
from tasks.run.night import Night, Outcome, PromptSource, digest
from tasks.sanitize import visible
from tasks.tracking.runs import BASELINE, GOOD, PIN, search
from tasks.tracking.store import TrackingStore

if TYPE_CHECKING:
    from kivi.measure.audit import AuditReport
    from kivi.measure.backends.comparison import ComparisonResult
    from kivi.measure.results import Provenance

TABLE = "generations.json"
POINTS_A_BATCH = 1000  # MLflow's limit of one log_batch
TAG_LENGTH = 5000  # MLflow's limit of a tag is 8,000 bytes; an error's end says least
NOTE_LENGTH = 8000  # the same limit, of a description: MLflow would cut it in a word
DATASET_DIGEST_LENGTH = 36  # MLflow's limit; the whole digest is a tag
# What the parent carries of its cells, since MLflow's charts show only the parent until it is expanded.
ROLLED_UP = (
    "quality.kl_mean",
    "quality.flip_rate",
    "generation.token_agreement",
    "answers.accuracy",
    "memory.compression",
    "memory.bytes_per_token",
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
        note: The parent's description, in Markdown; see :func:`shortened`.
        files: Text artefacts by their path.
    """
    client = store.client
    run = client.get_run(parent_id)
    _log_roll_ups(store, run, night, verdict)
    for path, text in files.items():
        client.log_text(parent_id, text, path)
    children = {child.data.tags["kivi.cell_key"]: child.info.run_id for child in find_cells(store, parent_id)}
    for outcome in night.outcomes:
        client.set_tag(children[outcome.cell.key], "kivi.verdict", verdict.of(outcome.cell.key))
    client.set_tag(parent_id, "kivi.verdict", verdict.word)
    client.set_tag(parent_id, MLFLOW_RUN_NOTE, shortened(note, "report.html"))
    # Who runs a night again of which everything is there changes nothing about how long it took.
    seen_before = all(outcome.reused for outcome in night.outcomes)
    client.set_terminated(
        parent_id, "FINISHED" if verdict.passed else "FAILED", end_time=run.info.end_time if seen_before else None
    )


def shortened(note: str, whole: str) -> str:
    """Return a description that MLflow takes, cut at the end of a line; ``whole`` is the run's file that has all of it."""
    if len(note) <= NOTE_LENGTH:
        return note
    cut = f"\n… the rest is in this run's {whole} under Artifacts."
    kept = note[: NOTE_LENGTH - len(cut)]
    return kept[: kept.rfind("\n") + 1] + cut


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
        tags = {**_night_tags(night), **writer_tag(store)}
        started = time.time() - sum(night.seconds.values())  # as MLflow shows it: the measurement, not only the logging
        run = client.create_run(store.experiment_id, start_time=int(started * 1000), run_name=visible(night.title), tags=tags)
        parent_id = run.info.run_id
        old = found
        client.log_batch(parent_id, params=[Param(name, value) for name, value in _night_params(night).items()])
    if night.flow_run_id:
        client.set_tag(parent_id, "prefect.flow_run_id", night.flow_run_id)
    marks = {name: mark for run in reversed(old) for name, mark in chosen_marks(run).items()}
    for name, mark in marks.items():  # before those that have them are superseded, so that no death in between loses them
        client.set_tag(parent_id, name, mark)
    for run in old:
        for cell in find_cells(store, run.info.run_id):
            _supersede(store, cell, by=parent_id)
        _supersede(store, run, by=parent_id)
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
    run_id = run.info.run_id
    if outcome.error:
        client.set_tag(run_id, "kivi.error", visible(outcome.error)[:TAG_LENGTH])
    elif "kivi.error" in run.data.tags:
        client.delete_tag(run_id, "kivi.error")
    if result is None:
        client.log_text(run_id, outcome.details or outcome.error, "error.txt")
        client.set_terminated(run_id, "FAILED")
        return
    if run.info.status == "FINISHED":
        return
    # A run that failed before, or that was left in the middle of logging, is brought to its end.
    client.log_batch(
        run_id,
        params=[Param(name, value) for name, value in cell_params(result).items()],
        tags=[RunTag(name, value) for name, value in _result_tags(result, content).items()],
    )
    points = list(_points(result, run.info.start_time))
    for start in range(0, len(points), POINTS_A_BATCH):
        client.log_batch(run_id, metrics=points[start : start + POINTS_A_BATCH])
    if prompts is not None:
        _log_dataset(store, run_id, prompts)
    _log_files(store, run_id, result)
    # MLflow shows the time from start to end as how long the run took: that of the measurement, not of the logging.
    end = run.info.start_time + int(1000 * sum(result.provenance.seconds.values()))
    client.set_terminated(run_id, "FINISHED", end_time=end)


def _find_cell(store: TrackingStore, parent_id: str, outcome: Outcome, content: str) -> Run:
    """Return the run that holds this very result, or an unfinished one without a result, or a new one."""
    found = search(store, {MLFLOW_PARENT_RUN_ID: parent_id, "kivi.cell_key": outcome.cell.key})
    run = next((run for run in found if run.data.tags.get("kivi.result", "") in {content, ""}), None)
    if run is None:
        tags = {"kivi.kind": "cell", "kivi.cell_key": outcome.cell.key, MLFLOW_PARENT_RUN_ID: parent_id, **writer_tag(store)}
        started = outcome.result.provenance.started.timestamp() if outcome.result else time.time()
        name = f"{outcome.cell.spec.slug} {visible(outcome.cell.prompt_set)}"
        run = store.client.create_run(store.experiment_id, start_time=int(started * 1000), tags=tags, run_name=name)
    for old in found:
        if old.info.run_id != run.info.run_id:
            _supersede(store, old, by=run.info.run_id)
    return run


def cell_params(result: CellResult) -> dict[str, str]:
    """Return the parameters of a cell, the same names for every kind of cache; ``none`` where the kind has no such thing."""
    made, fields = result.provenance, result.spec.model_dump()
    cache = {
        f"cache.{name}": str(fields.get(name, "none"))
        for name in ("kind", "key_bits", "value_bits", "group_size", "residual_length", "sink_length", "param_dtype")
    }
    params = {
        "model": made.model,
        "model_revision": made.model_revision,
        "prompt_set": made.prompt_set,
        "spec": result.spec.slug,
        **cache,
        "backend": made.backend,
        "dtype": made.model_dtype,
        "device": made.device,
    }
    return {name: visible(value) for name, value in params.items()}


def _result_tags(result: CellResult, content: str) -> dict[str, str]:
    made = result.provenance
    return {
        "kivi.result": content,
        "kivi.prompt_sha256": made.prompt_sha256,
        "kivi.weights_digest": made.weights_digest,
        "kivi.backend_reason": visible(made.backend_reason),
        "kivi.coverage": visible(made.coverage_note),
        **origin_tags(made),
    }


def origin_tags(made: Provenance | ComparisonResult | AuditReport) -> dict[str, str]:
    """Return the tags that say which code a result comes from, and with which packages and BLAS it ran."""
    return {
        "kivi.git_sha": made.git_sha + ("-dirty" if made.git_dirty else ""),
        "kivi.blas": made.blas,
        **{f"kivi.package.{name}": version for name, version in made.packages.items()},
    }


def _points(result: CellResult, start_ms: int) -> Iterator[Metric]:
    """Yield every number and every curve of a result; a point's time is the run's start plus its step."""
    for name, value in metric_values(result):
        yield Metric(name, value, start_ms, 0)
    curves = {
        "quality.logit_cosine": result.generation.logit_cosine,
        "generation.logit_cosine_free": result.generation.logit_cosine_free,
        "quality.step_kl": result.generation.step_kl,
    }
    for name, curve in curves.items():
        for step, value in enumerate(curve):
            yield Metric(name, value, start_ms + step, step)
    for bucket in result.quality.by_depth:
        yield Metric("quality.kl_by_depth", bucket.kl_mean, start_ms + bucket.start, bucket.start)


def _log_files(store: TrackingStore, run_id: str, result: CellResult) -> None:
    client = store.client
    client.log_text(run_id, result.model_dump_json(indent=2), "result.json")
    client.log_text(run_id, result.audit.model_dump_json(indent=2), "audit.json")
    client.log_text(run_id, cell_figure(result), "figures/by_step.svg")
    rows = [continuation.model_dump() for continuation in result.generation.continuations]
    if rows:
        # MLflow's own log_table appends to a table that is there; a whole file in its format does not.
        columns = list(rows[0])
        client.log_dict(run_id, {"columns": columns, "data": [[row[name] for name in columns] for row in rows]}, TABLE)
        client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, f'[{{"path": "{TABLE}", "type": "table"}}]')


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
    timestamp = run.info.start_time + attempt
    metrics = [Metric(name, value, timestamp, attempt) for name, value in values.items()]
    for start in range(0, len(metrics), POINTS_A_BATCH):
        store.client.log_batch(run.info.run_id, metrics=metrics[start : start + POINTS_A_BATCH])
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


def writer_tag(store: TrackingStore) -> dict[str, str]:
    """Return the tag that tells this process's runs from those of other machines, where several write."""
    return {"kivi.writer": visible(store.writer).replace("'", "")} if store.writer else {}


def _supersede(store: TrackingStore, run: Run, by: str) -> None:
    client, run_id = store.client, run.info.run_id
    client.set_tag(run_id, "kivi.superseded", by)
    client.update_run(run_id, name=f"{run.info.run_name} (superseded)")
    if run.info.status == "RUNNING":
        client.set_terminated(run_id, "KILLED")


track = task(name="track", cache_policy=NO_CACHE)(log_night)
finish = task(name="close the night", cache_policy=NO_CACHE)(finish_night)
