"""One run of a matrix within a flow: its cells are planned, measured, timed, logged and judged."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows.fan_out import Dispatch, FannedOut
from flows.log_and_judge import log_and_judge
from flows.progress import listener
from flows.results import NightResult, final_state
from kivi.measure import MeasureError
from kivi.measure.sequences import TokenStream, require_tokens
from kivi.models import check_model, local_tokenizer
from tasks.config import ConfigError, ModelConfig, NightlyConfig
from tasks.paths import RESULTS
from tasks.prompts.prompt_sets import PromptSet, load_prompt_set
from tasks.run.cells import CellError, loaded_model, run_cell, run_throughput, throughput_key, watch
from tasks.run.night import Night, Outcome, PromptSource
from tasks.run.plan import Cell, ModelIdentity, identify, plan, resolve_specs
from tasks.run.result_files import ResultStore, StoreError
from tasks.sanitize import guard_logs, redact


@task(name="prompts", task_run_name="prompts {config.name}", cache_policy=NO_CACHE)
def read_prompts(config: Any) -> PromptSet:
    """Read one prompt set."""
    return load_prompt_set(config)


@task(name="model", task_run_name="model {config.name}", cache_policy=NO_CACHE)
def identify_model(config: ModelConfig) -> ModelIdentity:
    """Load one model and say what it is."""
    return identify(config, loaded_model(config))


def run_matrix(config: NightlyConfig, tracking_dir: Path, refresh: bool) -> State[NightResult]:
    """Do what :func:`flows.nightly.nightly` says, within the flow run that calls it."""
    guard_logs()
    scheduled, seconds = scheduled_start(), dict[str, float]()
    with timed(seconds, "prepare"):
        require_runnable(config)
        store = ResultStore(tracking_dir / RESULTS)
        prompt_sets = {prompts.name: read_prompts(prompts) for prompts in config.prompt_sets}
        models = [identify_model(model) for model in config.models]
        planned = plan(config, list(prompt_sets.values()), models, night=scheduled)
    listener().planned(planned)
    night = Night(
        name=config.name,
        scheduled=scheduled,
        outcomes=(),
        skipped=planned.skipped,
        prompt_sets=tuple(describe(prompts) for prompts in prompt_sets.values()),
        flow_run_id=str(runtime.flow_run.id or ""),
    )
    fanned = FannedOut()
    if config.fan_out == "workers":
        with timed(seconds, "workers"):
            fanned = Dispatch(config, night, store, tracking_dir, get_run_logger().warning, refresh).run(planned)
        refresh = False  # what workers have measured anew is found from here on
    outcomes: list[Outcome] = []
    with watch(listener().step):
        for cells in planned.groups:  # a model is loaded once: its cells run, and are timed, in a row
            prompts = prompt_sets[cells[0].prompt_set]
            with timed(seconds, "cells"):
                group = [measure(cell, prompts, store, config.reference_gb, refresh, fanned) for cell in cells]
            with timed(seconds, "throughput"):
                outcomes += add_throughput(group, prompts, store, refresh, fanned)
    night = night.model_copy(update={"outcomes": tuple(outcomes), "seconds": seconds})
    result = log_and_judge(night, config, tracking_dir, refresh)
    return final_state(result)


def require_runnable(config: NightlyConfig) -> None:
    """Raise unless each backend that is required, and each model, is there."""
    resolve_specs(config)
    for model in config.models:
        check_model(model.name, model.revision)


def require_text(config: NightlyConfig) -> None:
    """Raise unless each prompt set can be read and is long enough for what is measured on it, as each model here counts it.

    Raises:
        PromptSetError: a set cannot be read.
        ConfigError: it is too short.
    """
    for given in config.prompt_sets:
        prompts, settings = load_prompt_set(given), config.settings_for(given)
        for model in config.models:
            tokenizer = local_tokenizer(model.name, model.revision)
            if tokenizer is None:
                continue
            try:
                require_tokens(TokenStream(tokenizer, prompts.texts(tokenizer)), settings)
            except MeasureError as error:
                raise ConfigError(f"prompt set {prompts.name!r} with model {model.name!r}: {error}") from None


def measure(
    cell: Cell, prompts: PromptSet, store: ResultStore, reference_gb: float, refresh: bool, fanned: FannedOut
) -> Outcome:
    """Run one cell; whatever stops it becomes its outcome, so that the others run. What workers have done is not done again."""
    if cell.key in fanned.failed:
        outcome = Outcome(cell=cell, error=fanned.failed[cell.key].removeprefix(f"{cell.label}: "))
    else:
        state = run_cell(cell, prompts, store, reference_gb=reference_gb, refresh=refresh, return_state=True)
        if state.is_completed():
            finished = state.result()
            outcome = Outcome(cell=cell, result=finished.result, reused=finished.reused and cell.key not in fanned.measured)
        else:
            outcome = Outcome(cell=cell, **explain(cell.label, state))
    listener().finished(outcome)
    return outcome


def add_throughput(
    group: list[Outcome], prompts: PromptSet, store: ResultStore, refresh: bool, fanned: FannedOut
) -> list[Outcome]:
    """Time the caches of the cells that have a result, interleaved; a cell that cannot be timed keeps its other figures."""
    cells = {outcome.cell.key: outcome.cell for outcome in group if outcome.result is not None}
    if not cells:
        return group
    measured = list(cells.values())
    label = f"{measured[0].model.name} × {prompts.name}"
    updates: dict[str, dict[str, Any]]
    if failure := fanned.failed.get(throughput_key(measured)):
        updates = {key: {"error": failure} for key in cells}
    elif (state := run_throughput(label, measured, prompts, store, refresh=refresh, return_state=True)).is_completed():
        timings = state.result()
        updates = {key: {"result": result} for key, result in timings.results.items()}
        updates |= {key: {"error": why.removeprefix(f"{cells[key].label}: ")} for key, why in timings.failed.items()}
    else:
        explained = explain(f"throughput of {label}", state)
        updates = dict.fromkeys(cells, explained)
    return [outcome.model_copy(update=updates.get(outcome.cell.key)) for outcome in group]


def explain(label: str, state: State[Any]) -> dict[str, str]:
    """Return the sentence and the traceback of a task that did not complete.

    Raises:
        StoreError: the folder of results stopped it, a full disk or the like: the next cell could not be kept either.
    """
    error = state.result(raise_on_failure=False)
    if isinstance(error, StoreError):
        raise error
    if not isinstance(error, BaseException):
        return {"error": state.message or state.type.value, "details": ""}
    sentence = str(error) if isinstance(error, CellError) else f"{type(error).__name__}: {error}"
    details = redact("".join(traceback.format_exception(error)))
    return {"error": redact(sentence).removeprefix(f"{label}: "), "details": details}


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


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add to ``seconds`` how long a part of a run took."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - started
