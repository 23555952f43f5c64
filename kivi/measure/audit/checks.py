"""The checks of an audit, by name, and their runner.

A check asks one question about a cache and answers it in typed findings. It takes any cache that follows mlx-lm's protocol and
has byte accounting (:mod:`kivi.measure.audit.subject`).
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from kivi import machine
from kivi.backends import resolve
from kivi.measure import MeasureError
from kivi.measure.audit import byte_accounting, decode_length, history, overflow, parity, reuse
from kivi.measure.audit.report import AuditReport, AuditSettings, Check, Notes, audit_passed
from kivi.measure.audit.subject import Subject, subject_of
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.spec import SHORT_NAMES, CacheSpec

CheckFunction = Callable[[Subject, AuditSettings, Notes], None]

CHECKS: Mapping[str, tuple[str, CheckFunction]] = {
    "bytes": ("Are the bytes that it reports the bytes that are live, at each decode step?", byte_accounting.check_bytes),
    "memory": ("Does MLX's own count of active memory say the same?", byte_accounting.check_memory),
    "growth": ("How many bytes does a token cost in the long run?", byte_accounting.check_growth),
    "definition": (
        "Does it give back what the definition says, old tokens quantised, new ones exact?",
        history.check_definition,
    ),
    "chunking": ("Does it matter in which calls the tokens came?", history.check_chunking),
    "append": ("Do old codes ever change?", history.check_append),
    "trim": ("Is it right after a trim, and when it grows again?", history.check_trim),
    "save": ("Does it survive saving and loading?", history.check_save),
    "batch": ("Is a row of a batch what the sequence alone would be?", history.check_batch),
    "prefix": ("Is a prompt that uses a prefix again what a cold run gives?", reuse.check_prefix),
    "turns": ("Does a chat that keeps its cache hold what the whole text gives?", reuse.check_turns),
    "cancel": ("Is what follows a stop, a dropped row or a rejected draft as if it had not been?", reuse.check_cancel),
    "overflow": (
        "Does it restore or refuse numbers that its scales and zeros may not hold?",
        overflow.check_overflow,
    ),
    "parity": ("Do all backends compute what the definition does?", parity.check_backends),
}
QUALITY = "quality"  # the check that needs a model
QUALITY_QUESTION = "What does its error do to a model's logits, decode step by decode step?"
CHECK_NAMES = (*CHECKS, QUALITY)


def audit_spec(
    spec: CacheSpec,
    settings: AuditSettings | None = None,
    *,
    names: Sequence[str] = (),
    reading: decode_length.Reading | None = None,
    monitor: Monitor | None = None,
) -> AuditReport:
    """Audit the project's own cache of ``spec``; see :func:`audit`.

    Raises:
        SpecError: its kind has no byte accounting, or layers differ.
        BackendError: its backend is not available.
        ValueError: no check has such a name.
    """
    settings = settings or AuditSettings()
    subject = subject_of(spec, heads=settings.heads, head_dim=settings.head_dim)
    return audit(subject, settings, names=names, reading=reading, monitor=monitor)


def audit(
    subject: Subject,
    settings: AuditSettings,
    *,
    names: Sequence[str] = (),
    reading: decode_length.Reading | None = None,
    monitor: Monitor | None = None,
) -> AuditReport:
    """Run the checks on ``subject`` and return what was found.

    What a cache raises in a check is an error of that check; the others still run.

    Args:
        subject: The cache under audit.
        settings: How long the checks are.
        names: Checks to run; all by default.
        reading: A model and texts for quality by decode length; without it that check is not run.
        monitor: Told of each check; may end the audit.

    Raises:
        ValueError: no check has such a name.
        DeadlineError: the monitor's deadline has passed.
    """
    chosen, monitor = check_names(names), monitor or Monitor()
    started, clock = datetime.now(UTC), time.monotonic()
    checks = []
    for index, name in enumerate(chosen):
        monitor.step(f"audit: {name}", index, len(chosen))
        notes = Notes(command(subject.spec, name))
        if name != QUALITY:
            question, function = CHECKS[name]
            checks.append(_run(name, question, notes, functools.partial(function, subject, settings, notes)))
        elif reading is None:
            reason = "not run: no model was asked for"
            checks.append(Check(name=name, question=QUALITY_QUESTION, seconds=0.0, findings=[], not_run=reason))
        else:
            ask = functools.partial(decode_length.check_quality, subject.spec, reading, monitor, notes)
            checks.append(_run(name, QUALITY_QUESTION, notes, ask))
    backend = resolve(subject.spec.backend).name
    why = "chosen by auto" if subject.spec.backend == "auto" else "required by the spec"
    return AuditReport(
        spec=subject.spec,
        cache=type(subject.make()).__name__,
        backend=f"{backend}, {why}",
        passed=audit_passed(checks),
        started=started,
        seconds=time.monotonic() - clock,
        **machine.provenance(),
        model="" if reading is None else f"{reading.model.name}, {reading.model.dtype}",
        settings=settings,
        checks=checks,
    )


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the checks to run, in the order of the audit; all when none is named.

    Raises:
        ValueError: no check has such a name.
    """
    for name in names:
        if name not in CHECK_NAMES:
            raise ValueError(f"check {name!r}: expected one of {', '.join(CHECK_NAMES)}")
    return tuple(name for name in CHECK_NAMES if not names or name in names)


def command(spec: CacheSpec, check: str) -> str:
    """Return the command that runs a check again."""
    short = {fields[0]: name for name, fields in SHORT_NAMES.items() if len(fields) == 1}
    defaults = CacheSpec(kind=spec.kind).model_dump()
    options = [
        f"{short.get(name, name)}={value}"
        for name, value in spec.model_dump(exclude={"kind", "layers"}).items()
        if value != defaults.get(name)  # a spec without rotation is written without one
    ]
    text = f"{spec.kind}:{','.join(options)}" if options else spec.kind
    return f"kivi audit {text} --check {check}"


def _run(name: str, question: str, notes: Notes, function: Callable[[], None]) -> Check:
    clock, details = time.monotonic(), ""
    try:
        function()
    except DeadlineError:
        raise
    except MeasureError as error:
        notes.check("measurement", str(error), "")
    except Exception as error:  # an audited cache may raise anything: that is a finding, with its traceback
        notes.check("raised", f"the cache raised {type(error).__name__}: {error}", "")
        details = traceback.format_exc()
    return Check(
        name=name,
        question=question,
        seconds=time.monotonic() - clock,
        findings=notes.findings,
        curves=notes.curves,
        details=details,
    )
