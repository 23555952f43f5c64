"""Audit one cache: what it says of itself against what can be seen from outside; the flow's state is the verdict."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.progress import listener
from kivi.backends import resolve
from kivi.measure.audit import AuditReport, subject_of
from kivi.models import check_model
from tasks.config import Config
from tasks.run.audit import EXPERIMENT, AuditConfig, log_audit, measure_audit, publish_audit
from tasks.run.cells import watch
from tasks.tracking.runs import Logged
from tasks.tracking.store import writer

SENTENCES = 5  # of what went wrong, in the flow's message


class Audited(Config):
    """What an audit came to, and where it was logged."""

    report: AuditReport
    logged: Logged


log = task(name="log the audit", cache_policy=NO_CACHE)(log_audit)


@flow(name="audit", flow_run_name="audit {config.spec.slug}", persist_result=False, validate_parameters=True)
def audit(config: AuditConfig, tracking_dir: Path = Path("mlruns")) -> State[Audited]:
    """Run the audit's checks on the cache of one spec, and log the report.

    The state is Failed when any check found an error, or none was run.

    Args:
        config: The spec, the checks, and the model that quality is measured with.
        tracking_dir: Folder of the MLflow store.
    """
    subject_of(config.spec, heads=1, head_dim=8)  # a cache without byte accounting, or a missing backend, ends it here
    resolve(config.spec.backend)
    if config.model is not None and config.needs_model:
        check_model(config.model.name, config.model.revision)
    with watch(listener().step):
        report = measure_audit(config)
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log(store, report, str(runtime.flow_run.id or ""))
    publish_audit(report)
    return final_state(Audited(report=report, logged=logged))


def final_state(audited: Audited) -> State[Audited]:
    """Return the flow's state, with the first of what is wrong in its message."""
    report = audited.report
    if report.passed:
        return Completed(message=report.headline, data=audited)
    errors = [f"{check}, {found.name}: {found.evidence}" for check, found in report.findings("error")]
    more = [f"and {len(errors) - SENTENCES} more"] if len(errors) > SENTENCES else []
    return Failed(message="\n".join([report.headline, *errors[:SENTENCES], *more]), data=audited)
