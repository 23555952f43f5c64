"""Tune: which cache for a model. Sensitivities, candidates, their judgement on held-out rows, and the answer."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows.matrix import explain
from flows.progress import listener
from flows.results import Checked, final_state
from kivi.measure.candidate import Candidate
from kivi.models import check_model
from tasks.paths import RESULTS
from tasks.run.cells import watch
from tasks.run.result_files import ResultStore
from tasks.sanitize import guard_logs
from tasks.tracking.store import writer
from tasks.tune.answer import bytes_budget, choose, require_room
from tasks.tune.candidates import Planned, count_candidates, judge, plan_candidates, smallest
from tasks.tune.config import EFFORTS, TuneConfig
from tasks.tune.outcome import EXPERIMENT, conclude, log_tuning, publish_tuning, write_tuning
from tasks.tune.pace import Pace
from tasks.tune.refine import between, fitting
from tasks.tune.sensitivity import candidate_over_sensitivity, count_sensitivities, measure_sensitivities
from tasks.tune.speed import decode_ratios
from tasks.tune.subject import Subject, read_subject, weights_bytes

prepare = task(name="model and texts", cache_policy=NO_CACHE)(read_subject)
log = task(name="log the tuning", cache_policy=NO_CACHE)(log_tuning)


@flow(name="tune", flow_run_name="tune {config.model.name}", persist_result=False, validate_parameters=True)
def tune(config: TuneConfig, tracking_dir: Path = Path("mlruns")) -> State[Checked]:
    """Find the cache for a model: the smallest of each tier, or the best within a budget.

    Everything measured is kept in the tracking folder, so that the same run again finds it or goes on where it was.

    Args:
        config: The model, the texts, how much care, and the budget.
        tracking_dir: Folder of the MLflow store, of finished results and of reports.
    """
    guard_logs()
    began, started = time.monotonic(), datetime.now(UTC)
    require_tunable(config)
    store, effort = ResultStore(tracking_dir / RESULTS), EFFORTS[config.effort]
    subject = prepare(config)
    weights = weights_bytes(subject.model)
    if (most := bytes_budget(config, weights)) is not None:
        require_room(config, most, smallest(subject, config.context))
    pace = Pace(listener().due, sensitivity=count_sensitivities(subject, effort), candidate=count_candidates(subject))
    pace.expect("candidate", like="sensitivity", times=candidate_over_sensitivity(subject, effort))
    with watch(listener().step):
        sensitivities = measure_sensitivities(
            subject, effort, store, deadline_s=config.deadline_s, done=lambda seconds: pace.done("sensitivity", seconds)
        )
        planned = plan_candidates(subject, sensitivities)
        if most is not None:
            planned += fitting(subject, sensitivities, config, most)
        candidates: list[Candidate] = []
        failed: dict[str, str] = {}
        while planned:
            pace.more("candidate", len(planned))
            judge_all(subject, config, store, planned, candidates, failed, pace)
            planned = between(subject, sensitivities, config, candidates)
        chosen = choose(config, candidates, weights)
        ratios = decode_ratios(subject, config, [one.spec for one in chosen.values()], store)
    result = conclude(
        subject, config, sensitivities, candidates, failed, chosen, ratios, started=started, seconds=time.monotonic() - began
    )
    folder = write_tuning(result, tracking_dir)
    with writer(tracking_dir, EXPERIMENT) as tracking:
        logged = log(tracking, result, str(runtime.flow_run.id or ""))
    publish_tuning(result)
    return final_state(Checked(result=result, logged=logged, folder=folder))


def judge_all(
    subject: Subject,
    config: TuneConfig,
    store: ResultStore,
    planned: list[Planned],
    candidates: list[Candidate],
    failed: dict[str, str],
    pace: Pace,
) -> None:
    """Judge what is planned: add to ``candidates`` those that have a result, and to ``failed`` by slug why others have none.

    Raises:
        StoreError: a result could not be kept.
    """
    for one in planned:
        began = time.monotonic()
        state = judge(one, subject, config, store, return_state=True)
        seconds = 0.0
        if state.is_completed():
            candidate, found = state.result()
            candidates.append(candidate)
            seconds = 0.0 if found else time.monotonic() - began
        else:
            failed[one.spec.slug] = explain(one.spec.slug, state)["error"]
        pace.done("candidate", seconds)


def require_tunable(config: TuneConfig) -> None:
    """Raise unless the model is there."""
    check_model(config.model.name, config.model.revision)
