"""The audit of one cache: scenes that put a question to it, each answered in typed findings.

A scene takes any cache that keeps mlx-lm's protocol and books (:mod:`kivi.measure.audit.subject`) and is told nothing of its
insides: an honest cache passes all of them, one that lies is named.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from kivi import BLAS, machine
from kivi.backends import resolve
from kivi.measure import MeasureError
from kivi.measure.audit import byte_accounting as books
from kivi.measure.audit import decode_length as model
from kivi.measure.audit import history, overflow
from kivi.measure.audit import parity as backends
from kivi.measure.audit.report import AuditReport, Notes, Scene, SceneSettings, audit_passed
from kivi.measure.audit.subject import Subject, subject_of
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.spec import SHORT_NAMES, CacheSpec

SceneFunction = Callable[[Subject, SceneSettings, Notes], None]

SCENES: Mapping[str, tuple[str, SceneFunction]] = {
    "books": ("Are the bytes that it reports the bytes that are live, at each decode step?", books.books),
    "witness": ("Does MLX's own count of active memory say the same?", books.witness),
    "growth": ("How many bytes does a token cost in the long run?", books.growth),
    "seed": ("The audit that this project began with, and the packed cache beside it", books.seed_scene),
    "definition": ("Does it give back what the definition says, old tokens quantised, new ones exact?", history.definition),
    "chunking": ("Does it matter in which calls the tokens came?", history.chunking),
    "append": ("Do old codes ever change?", history.append),
    "trim": ("Is it right after a trim, and when it grows again?", history.trim),
    "save": ("Does it survive saving and loading?", history.save_and_load),
    "batch": ("Is a row of a batch what the sequence alone would be?", history.batch),
    "overflow": ("Does it restore or refuse numbers that its scales and zeros may not hold?", overflow.overflow),
    "parity": ("Do all backends compute what the definition does?", backends.parity),
}
QUALITY = "quality"
QUALITY_QUESTION = "What does its error do to a model's logits, decode step by decode step?"
SCENE_NAMES = (*SCENES, QUALITY)


def audit_spec(
    spec: CacheSpec,
    settings: SceneSettings | None = None,
    *,
    names: Sequence[str] = (),
    reading: model.Reading | None = None,
    monitor: Monitor | None = None,
) -> AuditReport:
    """Audit the project's own cache of ``spec``; see :func:`audit`.

    Raises:
        SpecError: it is no cache with books.
        BackendError: its backend is not available.
        ValueError: no scene has such a name.
    """
    settings = settings or SceneSettings()
    subject = subject_of(spec, heads=settings.heads, head_dim=settings.head_dim)
    return audit(subject, settings, names=names, reading=reading, monitor=monitor)


def audit(
    subject: Subject,
    settings: SceneSettings,
    *,
    names: Sequence[str] = (),
    reading: model.Reading | None = None,
    monitor: Monitor | None = None,
) -> AuditReport:
    """Play the scenes on ``subject`` and return what was found.

    What a cache raises in a scene is an error of that scene; the others are played all the same.

    Args:
        subject: The cache under audit.
        settings: How long the scenes are.
        names: Scenes to play; all by default.
        reading: A model and texts for quality by decode length; without it that scene is not run.
        monitor: Told of each scene; may end the audit.

    Raises:
        ValueError: no scene has such a name.
        DeadlineError: the monitor's deadline has passed.
    """
    chosen, monitor = check_names(names), monitor or Monitor()
    started, clock, git = datetime.now(UTC), time.monotonic(), machine.git_state()
    scenes = []
    for index, name in enumerate(chosen):
        monitor.step(f"audit: {name}", index, len(chosen))
        notes = Notes(command(subject.spec, name))
        if name != QUALITY:
            question, function = SCENES[name]
            scenes.append(_play(name, question, notes, functools.partial(function, subject, settings, notes)))
        elif reading is None:
            reason = "not run: no model was asked for"
            scenes.append(Scene(name=name, question=QUALITY_QUESTION, seconds=0.0, findings=[], not_run=reason))
        else:
            ask = functools.partial(model.quality_by_decode_length, subject.spec, reading, monitor, notes)
            scenes.append(_play(name, QUALITY_QUESTION, notes, ask))
    backend = resolve(subject.spec.backend).name
    why = "chosen by auto" if subject.spec.backend == "auto" else "required by the spec"
    return AuditReport(
        spec=subject.spec,
        cache=type(subject.make()).__name__,
        backend=f"{backend}, {why}",
        passed=audit_passed(scenes),
        started=started,
        seconds=time.monotonic() - clock,
        device=machine.device(),
        blas=BLAS,
        packages=machine.packages(),
        git_sha=git.sha,
        git_dirty=git.dirty,
        model="" if reading is None else f"{reading.model.name}, {reading.model.dtype}",
        settings=settings,
        scenes=scenes,
    )


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the scenes to play, in the order of the audit; all when none is named.

    Raises:
        ValueError: no scene has such a name.
    """
    for name in names:
        if name not in SCENE_NAMES:
            raise ValueError(f"scene {name!r}: expected one of {', '.join(SCENE_NAMES)}")
    return tuple(name for name in SCENE_NAMES if not names or name in names)


def command(spec: CacheSpec, scene: str) -> str:
    """Return the command that shows a scene again."""
    short = {fields[0]: name for name, fields in SHORT_NAMES.items() if len(fields) == 1}
    defaults = CacheSpec(kind=spec.kind).model_dump()
    options = [
        f"{short.get(name, name)}={value}"
        for name, value in spec.model_dump(exclude={"kind", "layers"}).items()
        if value != defaults[name]
    ]
    text = f"{spec.kind}:{','.join(options)}" if options else spec.kind
    return f"kivi audit {text} --scene {scene}"


def _play(name: str, question: str, notes: Notes, function: Callable[[], None]) -> Scene:
    clock, details = time.monotonic(), ""
    try:
        function()
    except DeadlineError:
        raise
    except MeasureError as error:
        notes.check("measurement", str(error), "")
    except Exception as error:  # an audited cache may raise whatever it likes: that is a finding, with its traceback
        notes.check("raised", f"the cache raised {type(error).__name__}: {error}", "")
        details = traceback.format_exc()
    return Scene(
        name=name,
        question=question,
        seconds=time.monotonic() - clock,
        findings=notes.findings,
        curves=notes.curves,
        details=details,
    )


__all__ = [
    "QUALITY",
    "SCENES",
    "SCENE_NAMES",
    "AuditReport",
    "Scene",
    "SceneSettings",
    "Subject",
    "audit",
    "audit_spec",
    "check_names",
    "command",
    "subject_of",
]
