"""Audit a cache as a task, and log what was found."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import Field, field_validator
from pydantic_core import to_json

from kivi.measure.audit import QUALITY, AuditReport, AuditSettings, DecodeSettings, Reading, audit_spec, check_names
from kivi.measure.monitor import Monitor
from kivi.models.embedded import cache_dir
from tasks.config import Config, Model, ModelConfig, Prompts, PromptSetConfig, Spec
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.report.audit import audit_figures, audit_markdown
from tasks.report.provenance import origin_tags
from tasks.run.cells import Reporter, holding, loaded_model, references
from tasks.run.night import digest
from tasks.sanitize import visible
from tasks.tracking.runs import Entry, Logged, Point, cache_params, log_entry, shortened
from tasks.tracking.store import TrackingStore

EXPERIMENT = "kivi-audit"
STORED = {"bytes": "books", "memory": "witness", "byte accounting": "books"}  # see _metric


class AuditConfig(Config):
    """What is audited, and how thoroughly."""

    spec: Spec = Field(description="a cache of kind kivi or kivi-roundtrip")
    checks: tuple[str, ...] = Field((), description="checks to run; all by default")
    model: Model | None = Field(ModelConfig(), description="what quality by decode length is measured with; null: not at all")
    prompts: Prompts = Field(PromptSetConfig(source="humaneval"), description="what the model reads")
    settings: AuditSettings = Field(AuditSettings(), description="how long the checks are")
    decode: DecodeSettings = Field(DecodeSettings(), description="how the error is followed along a decode")
    reference_gb: float = Field(1.0, gt=0, description="disk for the full cache's logits")
    deadline_s: float = Field(3600, gt=0, description="seconds after which the audit is stopped and fails")

    @field_validator("checks")
    @classmethod
    def _check_names(cls, checks: tuple[str, ...]) -> tuple[str, ...]:
        check_names(checks)
        return checks

    @property
    def needs_model(self) -> bool:
        """Whether quality by decode length is asked for."""
        return self.model is not None and QUALITY in check_names(self.checks)


@task(name="audit", task_run_name="audit {config.spec.slug}", cache_policy=NO_CACHE)
def measure_audit(config: AuditConfig) -> AuditReport:
    """Audit the cache, with the host's accelerator held."""
    label = f"audit of {config.spec.slug}"
    with holding(label, config.deadline_s):
        reading = None
        if config.model is not None and config.needs_model:
            model = loaded_model(config.model)
            texts = load_prompt_set(config.prompts).texts(model.tokenizer)
            reading = Reading(model, texts, references(cache_dir() / "references", config.reference_gb), config.decode)
        monitor = Monitor(Reporter(label, "audit"), config.deadline_s)
        return audit_spec(config.spec, config.settings, names=config.checks, reading=reading, monitor=monitor)


def log_audit(store: TrackingStore, report: AuditReport, flow_run_id: str = "") -> Logged:
    """Log an audit, made here or elsewhere; the same report is logged once.

    Args:
        store: The store of experiment ``kivi-audit``, held by this process.
        report: The audit.
        flow_run_id: The flow run that made it, if one did.
    """
    text = audit_markdown(report)
    entry = Entry(
        name=f"audit {report.spec.slug}",
        kind="audit",
        digest=_digest(report),
        started=report.started,
        passed=report.passed,
        params={
            "spec": report.spec.slug,
            "cache": report.cache,
            "backend": report.backend,
            "device": report.device,
            "model": report.model or "none",
            **cache_params(report.spec),
        },
        tags=origin_tags(report, flow_run_id),
        points=tuple(_points(report)),
        files={"audit.json": report.model_dump_json(indent=1), "audit.md": text, **audit_figures(report)},
        note=shortened(text, "Markdown file"),
    )
    return Logged(experiment_id=store.experiment_id, run_id=log_entry(store, entry))


def publish_audit(report: AuditReport) -> None:
    """Make Prefect's artifacts: the page, and the findings as a table. Only within a run."""
    create_markdown_artifact(audit_markdown(report), key="audit", description=report.headline)
    rows = [
        {"check": check.name, "finding": found.name, "severity": found.severity, "evidence": visible(found.evidence)}
        for check in report.checks
        for found in check.findings
    ]
    create_table_artifact(rows, key="audit-findings", description=report.headline)


def _digest(report: AuditReport) -> str:
    """Return the digest of a report as version 0.1.0 wrote it: stores know the runs of its audits by that."""
    fields = report.model_dump(mode="json")
    fields["scenes"] = [{**check, "name": STORED.get(check["name"], check["name"])} for check in fields.pop("checks")]
    return digest((to_json(fields).decode(),))


def _metric(check: str, finding: str = "") -> str:
    """Return the name of a check, or of its finding, in metrics: as in audits that stores already have."""
    check, finding = STORED.get(check, check), STORED.get(finding, finding.replace("accounted ", "bill of "))
    return f"{check}.{re.sub(r'[^a-z0-9]+', '_', finding.lower()).strip('_')}" if finding else check


def _points(report: AuditReport) -> Iterator[Point]:
    """Yield the verdicts, the numbers of every finding, and every curve."""
    yield Point(name="audit.passed", value=float(report.passed))
    for severity in ("error", "warning"):
        yield Point(name=f"audit.{severity}s", value=float(len(report.findings(severity))))
    for check in report.checks:
        if check.outcome != "not run":
            yield Point(name=f"audit.passed/{_metric(check.name)}", value=float(check.outcome == "passed"))
        for found in check.findings:
            for name, value in found.numbers.items():
                yield Point(name=f"{_metric(check.name, found.name)}/{name}", value=value)
        for curve in check.curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                yield Point(name=curve.name, value=value, step=step)
