"""Compare backends: parity with the definition and speed of one or more caches; the flow's state says whether parity held."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows.progress import listener
from flows.results import Checked, final_state
from kivi.measure.backends.comparison import check_comparable
from kivi.models import check_model
from tasks.run.cells import watch
from tasks.run.compare import EXPERIMENT, CompareConfig, log_comparison, measure_comparison, publish_comparison
from tasks.tracking.store import writer

log = task(name="log the comparison", cache_policy=NO_CACHE)(log_comparison)


@flow(name="compare", flow_run_name="compare backends", persist_result=False, validate_parameters=True)
def compare(config: CompareConfig, tracking_dir: Path = Path("mlruns")) -> State[Checked]:
    """Compare every available backend on each spec, and log a parent run with a child for each.

    The state is Failed when a backend differs from the definition or a kernel failed. What could not run here, a backend
    without its device or a shape that MLX refuses, is listed as not run and fails nothing.

    Args:
        config: The specs, the model, and how much is compared.
        tracking_dir: Folder of the MLflow store.
    """
    require_comparable(config)
    with watch(listener().step):
        result = measure_comparison(config)
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log(store, result, str(runtime.flow_run.id or ""))
    publish_comparison(result)
    return final_state(Checked(result=result, logged=logged))


def require_comparable(config: CompareConfig) -> None:
    """Raise unless the caches have backends to be compared, and the model is there."""
    for spec in config.specs:
        check_comparable(spec)
    if config.model is not None:
        check_model(config.model.name, config.model.revision)
