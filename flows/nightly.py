"""The nightly regression: the cells of a matrix, measured, tracked, gated and reported; the flow's state is the verdict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from flows.fan_out import FannedOut, fan_out
from flows.late_nights import newer_run
from flows.log_and_judge import NightResult, conclude
from flows.progress import listener
from kivi.models import check_model
from tasks.config import ModelConfig, NightlyConfig
from tasks.paths import RESULTS
from tasks.prompts.prompt_sets import PromptSet, load_prompt_set
from tasks.run.cells import CellError, loaded_model, run_cell, run_throughput, throughput_key, watch
from tasks.run.night import Night, Outcome, PromptSource
from tasks.run.plan import Cell, ModelIdentity, check_thresholds, identify, plan, resolve_specs
from tasks.run.result_files import ResultStore, StoreError
from tasks.sanitize import guard_logs, redact

__all__ = ["NightResult", "nightly", "run_matrix"]

REASONS = 5  # sentences of the verdict in the flow's message


@task(name="prompts", task_run_name="prompts {config.name}", cache_policy=NO_CACHE)
def read_prompts(config: Any) -> PromptSet:
    """Read one prompt set."""
    return load_prompt_set(config)


@task(name="model", task_run_name="model {config.name}", cache_policy=NO_CACHE)
def identify_model(config: ModelConfig) -> ModelIdentity:
    """Load one model and say what it is."""
    return identify(config, loaded_model(config))


@flow(name="nightly", flow_run_name="{config.name}", persist_result=False, validate_parameters=True)
def nightly(config: NightlyConfig, tracking_dir: Path = Path("mlruns"), refresh: bool = False) -> State[NightResult]:
    """Measure a matrix of models, prompt sets and caches against each model's full-precision cache.

    The state is Completed when every cell passed its limits and Failed otherwise, with the verdict as message. Run again
    on the same night it finds what is finished and measures what is not. A run that comes late, when a later one of its
    schedule is due already, is Cancelled.

    Args:
        config: The matrix, how much is measured, and what passes.
        tracking_dir: Folder of the MLflow store, of finished results and of reports.
        refresh: Measure everything anew; runs of before are tagged as superseded.

    Raises:
        ConfigError: a limit is for no cache of the matrix.
    """
    outdated = newer_run()
    if outdated:
        return Cancelled(message=outdated)
    check_thresholds(config)
    return run_matrix(config, tracking_dir, refresh)


def run_matrix(config: NightlyConfig, tracking_dir: Path, refresh: bool) -> State[NightResult]:
    """Do what :func:`nightly` says, within the flow run that calls it."""
    guard_logs()
    clock, scheduled = Clock(), scheduled_start()
    with clock.part("prepare"):
        resolve_specs(config)  # a backend that is required and missing, or a model that is not there, ends it here
        for model in config.models:
            check_model(model.name, model.revision)
        store = ResultStore(tracking_dir / RESULTS)
        prompt_sets = [read_prompts(prompts) for prompts in config.prompt_sets]
        models = [identify_model(model) for model in config.models]
        planned = plan(config, prompt_sets, models, night=scheduled)
    listener().planned(planned)
    by_name = {prompts.name: prompts for prompts in prompt_sets}
    night = Night(
        name=config.name,
        scheduled=scheduled,
        outcomes=(),
        skipped=planned.skipped,
        prompt_sets=tuple(describe(prompts) for prompts in prompt_sets),
        flow_run_id=str(runtime.flow_run.id or ""),
    )
    fanned = FannedOut()
    if config.fan_out == "workers":
        with clock.part("workers"):
            log = get_run_logger().warning
            fanned = fan_out(config, planned, night, store, tracking_dir, refresh=refresh, log=log)
        refresh = False  # what workers have measured anew is found from here on
    outcomes: list[Outcome] = []
    with watch(listener().step):
        for cells in planned.groups:  # a model is loaded once: its cells run, and are timed, in a row
            prompts = by_name[cells[0].prompt_set]
            with clock.part("cells"):
                group = [measure(cell, prompts, store, config.reference_gb, refresh, fanned) for cell in cells]
            with clock.part("throughput"):
                outcomes += add_throughput(group, prompts, store, refresh, fanned)
    night = night.model_copy(update={"outcomes": tuple(outcomes), "seconds": clock.seconds})
    result = conclude(night, config, tracking_dir, refresh)
    return final_state(result)


def measure(
    cell: Cell, prompts: PromptSet, store: ResultStore, reference_gb: float, refresh: bool, fanned: FannedOut
) -> Outcome:
    """Run one cell; whatever stops it becomes its outcome, so that the others run. What workers have done is not done again."""
    if cell.key in fanned.failed:
        outcome = Outcome(cell=cell, error=fanned.failed[cell.key].removeprefix(f"{cell.label}: "))
        listener().finished(outcome)
        return outcome
    state = run_cell(cell, prompts, store, reference_gb=reference_gb, refresh=refresh, return_state=True)
    if state.is_completed():
        finished = state.result()
        outcome = Outcome(cell=cell, result=finished.result, reused=finished.reused and cell.key not in fanned.measured)
    else:
        stop_without_a_store(state)
        outcome = Outcome(cell=cell, **explain(cell.label, state))
    listener().finished(outcome)
    return outcome


def add_throughput(
    group: list[Outcome], prompts: PromptSet, store: ResultStore, refresh: bool, fanned: FannedOut
) -> list[Outcome]:
    """Time the caches of the cells that have a result, interleaved; a cell that cannot be timed keeps its other figures."""
    cells = [outcome.cell for outcome in group if outcome.result is not None]
    if not cells:
        return group
    label = f"{cells[0].model.name} × {prompts.name}"
    if throughput_key(cells) in fanned.failed:
        failure = {"error": fanned.failed[throughput_key(cells)]}
        return [outcome.model_copy(update=failure) if outcome.result else outcome for outcome in group]
    state = run_throughput(label, cells, prompts, store, refresh=refresh, return_state=True)
    if not state.is_completed():
        stop_without_a_store(state)
        failure = explain(f"throughput of {label}", state)
        return [outcome.model_copy(update=failure) if outcome.result else outcome for outcome in group]
    timed = state.result()
    outcomes = []
    for outcome in group:
        key = outcome.cell.key
        if key in timed.results:
            outcome = outcome.model_copy(update={"result": timed.results[key]})
        elif key in timed.failed:
            outcome = outcome.model_copy(update={"error": timed.failed[key].removeprefix(f"{outcome.cell.label}: ")})
        outcomes.append(outcome)
    return outcomes


def stop_without_a_store(state: State[Any]) -> None:
    """Raise what stopped a task when it was the folder of results: the next cell could not be kept either, and takes hours.

    Raises:
        StoreError: the disk is full, or the like.
    """
    error = state.result(raise_on_failure=False)
    if isinstance(error, StoreError):
        raise error


def explain(label: str, state: State[Any]) -> dict[str, str]:
    """Return the sentence and the traceback of a task that did not complete."""
    error = state.result(raise_on_failure=False)
    if not isinstance(error, BaseException):
        return {"error": state.message or state.type.value, "details": ""}
    sentence = str(error) if isinstance(error, CellError) else f"{type(error).__name__}: {error}"
    details = redact("".join(traceback.format_exception(error)))
    return {"error": redact(sentence).removeprefix(f"{label}: "), "details": details}


def final_state(result: NightResult) -> State[NightResult]:
    """Return the flow's state: the verdict, with its first reasons."""
    verdict = result.verdict
    if verdict.passed:
        return Completed(message=verdict.headline, data=result)
    more = len(verdict.reasons) - REASONS
    lines = [verdict.headline, *verdict.reasons[:REASONS], *([f"and {more} more"] if more > 0 else [])]
    return Failed(message="\n".join(lines), data=result)


def scheduled_start() -> str:
    """Return what the night is called.

    A run of a deployment is named for its scheduled start, which a run that is resumed or retried keeps. A run by hand is
    named for the day (UTC), so that running it again on the same day finds its results.
    """
    if runtime.deployment.id:
        return str(runtime.flow_run.scheduled_start_time.strftime("%Y-%m-%d %H:%M UTC"))
    return datetime.now(UTC).strftime("%Y-%m-%d")


def describe(prompts: PromptSet) -> PromptSource:
    """Return where a prompt set came from, in a phrase."""
    revision = f" at {prompts.revision}" if prompts.revision else ""
    source = f"{prompts.source}{revision}, split {prompts.split}, {prompts.note}"
    return PromptSource(name=prompts.name, sha256=prompts.sha256, source=source, rows=len(prompts.rows))


class Clock:
    """How long each part of a run took; a part that comes again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
