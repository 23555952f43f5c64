"""Audit one cache: what it says of itself against what can be seen from outside; the flow's state is the verdict."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows.progress import listener
from flows.results import Checked, final_state
from kivi.backends import resolve
from kivi.measure.audit import subject_of
from kivi.models import check_model
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.run.audit import EXPERIMENT, AuditConfig, log_audit, measure_audit, publish_audit
from tasks.run.cells import watch
from tasks.tracking.store import writer

log = task(name="log the audit", cache_policy=NO_CACHE)(log_audit)


@flow(name="audit", flow_run_name="audit {config.spec.slug}", persist_result=False, validate_parameters=True)
def audit(config: AuditConfig, tracking_dir: Path = Path("mlruns")) -> State[Checked]:
    """Run the audit's checks on the cache of one spec, and log the report.

    The state is Failed when any check found an error, or none was run.

    Args:
        config: The spec, the checks, and the model that quality is measured with.
        tracking_dir: Folder of the MLflow store.
    """
    require_auditable(config)
    with watch(listener().step):
        report = measure_audit(config)
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log(store, report, str(runtime.flow_run.id or ""))
    publish_audit(report)
    return final_state(Checked(result=report, logged=logged))


def require_auditable(config: AuditConfig) -> None:
    """Raise unless the cache counts its bytes, and its backend, the model and the prompts are there."""
    subject_of(config.spec, heads=1, head_dim=8)
    resolve(config.spec.backend)
    if config.model is not None and config.needs_model:
        check_model(config.model.name, config.model.revision)
        load_prompt_set(config.prompts)
