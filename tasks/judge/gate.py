"""The gate: what was measured against what is allowed, the sentence for each thing that is not, and who is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from pydantic import Field

from kivi.measure.results import CellResult, MetricField, Quality, metric_fields, metric_values
from tasks.config import Bounds, Config, NightlyConfig, TierMetric
from tasks.judge.regression import Change, Comparison
from tasks.run.night import Night, Outcome
from tasks.sanitize import visible

METRICS = {
    "kl_mean": "quality.kl_mean",
    "kl_p99": "quality.kl_p99",
    "flip_rate": "quality.flip_rate",
    "token_agreement": "generation.token_agreement",
    "accuracy": "answers.accuracy",
    "compression": "memory.compression",
    "prefill_ratio": "throughput.prefill_ratio",
    "decode_ratio": "throughput.decode_ratio",
}

QUALITY = ("quality.", "generation.", "answers.")  # the families that say how near the full cache it is

PASSED, FAILED = "kivi.gate.passed", "kivi.gate.failed"  # Prefect's events
REASONS = 20  # in the event; the report has all

Tier = Literal["good", "marginal", "bad"]
TIERS: tuple[Tier, Tier, Tier] = ("good", "marginal", "bad")


class Standing(Config):
    """The tier of a cell, the bounds, and the figure that decided it. It is shown to readers and fails nothing."""

    tier: Tier
    bounds: dict[TierMetric, Bounds]
    decided_by: TierMetric | None = Field(None, description="the first of the figures in this tier; None where all are good")


class Check(Config):
    """One thing that was looked at. ``reason`` is a sentence when it did not pass."""

    cell: str = Field(description="label of the cell")
    cell_key: str
    metric: str = Field(description="name of the metric, audit, or result")
    value: float | None = None
    limit: float | None = Field(None, description="the threshold, or what the earlier night had")
    passed: bool
    reason: str = ""


class Verdict(Config):
    """Whether the night passed, and every check behind that."""

    passed: bool
    reasons: tuple[str, ...] = Field(description="one sentence for each check that did not pass")
    checks: tuple[Check, ...]
    comparison: Comparison = Field(Comparison(), description="the night beside the last good one and the pinned one")
    standings: dict[str, Standing] = Field(default_factory=dict, description="by cell key, of the cells that have a result")

    @property
    def word(self) -> str:
        return "pass" if self.passed else "fail"

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        if not self.checks:
            return "failed: nothing was measured"
        if self.passed:
            return f"passed: {len(self.checks)} checks"
        failed = len(self.reasons)
        return f"failed: {failed} of {len(self.checks)} checks did not pass"

    def of(self, cell_key: str) -> str:
        """Return ``pass`` or ``fail`` for one cell; a cell without checks has not passed."""
        checks = [check for check in self.checks if check.cell_key == cell_key]
        return "pass" if checks and all(check.passed for check in checks) else "fail"


def judge(night: Night, config: NightlyConfig, comparison: Comparison | None = None) -> Verdict:
    """Return the verdict on a night. A failed or missing cell is never a pass, nor is a night without cells.

    Args:
        night: The night.
        config: Its matrix, with the limits of each spec.
        comparison: The night beside earlier ones; each regression in it does not pass.
    """
    comparison = comparison or Comparison()
    checks, standings, notes = [], {}, list(comparison.notes)
    for outcome in night.outcomes:
        thresholds = config.thresholds_for(outcome.cell.spec.slug)
        notes += _notes(outcome, thresholds.limits)
        checks += list(_check(outcome, thresholds.limits))
        if outcome.result is not None:
            quality = outcome.result.quality
            standings[outcome.cell.key] = standing(quality, thresholds.tiers)
    checks += [_check_change(change) for change in comparison.changes if change.outcome != "not compared"]
    reasons = tuple(check.reason for check in checks if not check.passed)
    return Verdict(
        passed=bool(checks) and not reasons,
        reasons=reasons,
        checks=tuple(checks),
        comparison=comparison.model_copy(update={"notes": tuple(notes)}),
        standings=standings,
    )


def standing(quality: Quality, bounds: dict[TierMetric, Bounds]) -> Standing:
    """Return how far the quality is from the full cache's: the worst by mean KL, p99 KL and flip rate."""
    levels = {name: sum(getattr(quality, name) > bound for bound in pair) for name, pair in bounds.items()}
    name, level = max(levels.items(), key=lambda one: one[1])
    return Standing(tier=TIERS[level], bounds=bounds, decided_by=name if level else None)


def announce(night: Night, verdict: Verdict) -> None:
    """Emit ``kivi.gate.passed`` or ``kivi.gate.failed`` about the night's matrix, for automations of the Prefect server."""
    related = {"prefect.resource.id": f"prefect.flow-run.{night.flow_run_id}", "prefect.resource.role": "flow-run"}
    emit_event(
        PASSED if verdict.passed else FAILED,
        resource={"prefect.resource.id": f"kivi.matrix.{night.name}", "prefect.resource.name": visible(night.title)},
        related=[related] if night.flow_run_id else [],
        payload={
            "night": visible(night.title),
            "headline": verdict.headline,
            "reasons": [visible(reason) for reason in verdict.reasons[:REASONS]],
        },
    )


gate = task(name="gate", cache_policy=NO_CACHE)(judge)


def _check(outcome: Outcome, limits: Mapping[str, float]) -> Iterator[Check]:
    label, key = outcome.cell.label, outcome.cell.key
    if outcome.error or outcome.result is None:
        why = f"failed: {outcome.error}" if outcome.error else "has no result"
        yield Check(cell=label, cell_key=key, metric="result", passed=False, reason=f"{label} {why}")
    if outcome.result is None:
        return
    yield _check_audit(label, outcome.result)
    fields = {field.name: field for field in metric_fields()}
    values = dict(metric_values(outcome.result))
    for name, limit in limits.items():
        yield _check_limit(label, key, fields[METRICS[name]], values.get(METRICS[name]), limit)


def _notes(outcome: Outcome, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield what a pass of this cell does not say: that its quality has no limit, and what its audit warns of."""
    if outcome.result is None:
        return
    if not any(METRICS[name].startswith(QUALITY) for name in limits):
        yield f"{outcome.cell.label} has no limit of quality, so any passes: set one under thresholds"
    for finding in outcome.result.audit.findings:
        if finding.severity == "warning":
            yield f"{outcome.cell.label}: {finding.evidence}"


def _check_audit(label: str, result: CellResult) -> Check:
    evidence = "; ".join(finding.evidence for finding in result.audit.findings if finding.severity == "error")
    reason = "" if result.audit.passed else f"{label} failed its audit: {evidence or 'no evidence was recorded'}"
    return Check(cell=label, cell_key=result.cell_key, metric="audit.passed", passed=result.audit.passed, reason=reason)


def _check_limit(label: str, key: str, field: MetricField, value: float | None, limit: float) -> Check:
    unit = "" if field.unit == "1" else f" {field.unit}"
    if value is None:
        passed, reason = False, f"{label}: {field.name} was not measured, and has a limit of {limit:g}{unit}"
    elif field.higher_is_better:
        passed, reason = value >= limit, f"{label}: {field.name} is {value:.6g}{unit}, below the limit of {limit:g}{unit}"
    else:
        passed, reason = value <= limit, f"{label}: {field.name} is {value:.6g}{unit}, above the limit of {limit:g}{unit}"
    return Check(
        cell=label,
        cell_key=key,
        metric=field.name,
        value=value,
        limit=limit,
        passed=passed,
        reason="" if passed else reason,
    )


def _check_change(change: Change) -> Check:
    passed = change.outcome != "regression"
    return Check(
        cell=change.cell,
        cell_key=change.cell_key,
        metric=change.metric,
        value=change.after,
        limit=change.before,
        passed=passed,
        reason="" if passed else change.sentence,
    )
