"""Compare backends: parity with the definition and speed of one or more caches; the flow's state says whether parity held."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.progress import listener
from kivi.measure.backends.comparison import ComparisonResult, check_comparable
from kivi.models import check_model
from tasks.config import Config
from tasks.report.comparison import headline
from tasks.run.cells import watch
from tasks.run.compare import EXPERIMENT, CompareConfig, log_comparison, measure_comparison, publish_comparison
from tasks.tracking.runs import Logged
from tasks.tracking.store import writer

SENTENCES = 5  # of what went wrong, in the flow's message


class Compared(Config):
    """What a comparison came to, and where it was logged."""

    result: ComparisonResult
    logged: Logged


log = task(name="log the comparison", cache_policy=NO_CACHE)(log_comparison)


@flow(name="compare", flow_run_name="compare backends", persist_result=False, validate_parameters=True)
def compare(config: CompareConfig, tracking_dir: Path = Path("mlruns")) -> State[Compared]:
    """Compare every available backend on each spec, and log a parent run with a child for each.

    The state is Failed when a backend differs from the definition or a kernel failed. What could not run here, a backend
    without its device or a shape that MLX refuses, is listed as not run and fails nothing.

    Args:
        config: The specs, the model, and how much is compared.
        tracking_dir: Folder of the MLflow store.
    """
    for spec in config.specs:
        check_comparable(spec)
    if config.model is not None:
        check_model(config.model.name, config.model.revision)
    with watch(listener().step):
        result = measure_comparison(config)
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log(store, result, str(runtime.flow_run.id or ""))
    publish_comparison(result)
    return final_state(Compared(result=result, logged=logged))


def final_state(compared: Compared) -> State[Compared]:
    """Return the flow's state, with the first of what went wrong in its message."""
    result = compared.result
    if result.passed:
        return Completed(message=headline(result), data=compared)
    problems = result.problems or ["no parity check was run"]
    more = [f"and {len(problems) - SENTENCES} more"] if len(problems) > SENTENCES else []
    return Failed(message="\n".join([headline(result), *problems[:SENTENCES], *more]), data=compared)
