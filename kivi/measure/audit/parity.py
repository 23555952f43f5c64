"""The check of kernels: every available backend against the definition, with the spec's bits, groups and parameters."""

from __future__ import annotations

from collections.abc import Sequence

from kivi.backends import NAMES, available, resolve
from kivi.measure.audit.report import AuditSettings, Notes
from kivi.measure.audit.subject import Subject, join
from kivi.measure.backends.parity import DTYPES, Case, ParityCheck, check_parity
from kivi.measure.backends.skip_reason import not_run

SHAPES = ((2, 256, 64), (1, 45, 80))  # KV heads, tokens, channels: whole groups, and ragged in both directions


def check_backends(subject: Subject, settings: AuditSettings, notes: Notes) -> None:
    """Compare round trip, codes and attention of each backend with the definition, in every dtype."""
    cases = [Case(dtype, *shape) for dtype in DTYPES for shape in SHAPES]
    for name in NAMES:
        state = available(name)
        if state.ok:
            _note(notes, name, list(check_parity(resolve(name), subject.spec, cases, seed=settings.seed)))
        else:
            notes.info(name, not_run(state.reason))


def _note(notes: Notes, name: str, checks: Sequence[ParityCheck]) -> None:
    exact = [check for check in checks if check.bound == 0 and not check.not_run]
    close = [check for check in checks if check.bound > 0 and not check.not_run]
    worst = max((check.relative_error / check.bound for check in close), default=0.0)
    right = f"{sum(check.elements for check in exact):,} numbers of round trip and codes equal the definition bit for bit"
    if close:
        right += f"; attention comes to {worst:.0%} of its bound at most"
    notes.check(
        name,
        join([check.problem for check in checks if not check.passed]),
        right,
        checks=len(checks),
        differing=sum(check.differing for check in exact),
        attention_share_of_bound=worst,
    )
    for check in checks:
        if check.not_run:
            notes.info(name, f"{check.label}: not run: {check.not_run}")
