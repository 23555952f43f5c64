"""Tell whoever listens what came of a night: an event on the Prefect server, for its automations to act on."""

from __future__ import annotations

from prefect.events import emit_event

from tasks.judge.gate import Verdict
from tasks.run.night import Night
from tasks.sanitize import visible

PASSED, FAILED = "kivi.gate.passed", "kivi.gate.failed"
REASONS = 20  # in the event; the report has all


def announce(night: Night, verdict: Verdict) -> None:
    """Emit ``kivi.gate.passed`` or ``kivi.gate.failed``, with the verdict's sentences, about the night's matrix."""
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
