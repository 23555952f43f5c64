"""The typed, versioned result of an audit: scenes, and what each found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from kivi.measure.results import Finding, Record
from kivi.measure.settings import Settings
from kivi.spec import CacheSpec


class SceneSettings(Settings):
    """How long the scenes are. Tokens beyond these come from the spec, whose window has to fill."""

    heads: int = Field(4, ge=1, description="KV heads of the caches that are audited")
    head_dim: int = Field(64, ge=8, description="channels of a key and of a value")
    decode_steps: int = Field(200, ge=1, description="decode steps at each of which the books are looked at")
    history: int = Field(1024, ge=1, description="tokens streamed to see whether old codes change")
    seed: int = Field(0, ge=0, description="seed of keys, values and resampling")


class SceneFinding(Finding):
    """Something that a scene saw: a sentence, the numbers behind it, and the command that shows it again."""

    numbers: dict[str, float] = Field({}, description="the evidence in numbers, units in their names")


class Curve(Record):
    """A number along a scene, for a figure and for MLflow's charts."""

    name: str = Field(description="metric's name, e.g. audit.resident_bytes")
    axis: str = Field(description="what is counted along x, e.g. decode step")
    unit: str
    steps: list[int]
    values: list[float]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.steps) != len(self.values):
            raise ValueError(f"{self.name}: {len(self.steps)} steps and {len(self.values)} values")
        return self


class Scene(Record):
    """One question put to the cache."""

    name: str
    question: str
    seconds: float
    findings: list[SceneFinding]
    curves: list[Curve] = Field([])
    not_run: str = Field("", description="why the scene was not run")
    details: str = Field("", description="the traceback, when the cache raised something")

    @property
    def outcome(self) -> Literal["passed", "failed", "not run"]:
        """Whether the cache told the truth here."""
        if any(finding.severity == "error" for finding in self.findings):
            return "failed"
        return "not run" if self.not_run else "passed"


class AuditReport(Record):
    """An audit of one cache: what was asked, what was seen, on what it ran."""

    schema_version: Literal[1] = 1
    kind: Literal["kivi-audit"] = "kivi-audit"
    spec: CacheSpec
    cache: str = Field(description="class of the cache that was audited")
    backend: str = Field(description="who ran its kernels, and why that one")
    passed: bool = Field(description="whether no scene found an error, and at least one ran")
    started: AwareDatetime
    seconds: float
    device: str = Field(description="hardware by kind, never by host name")
    blas: str
    packages: dict[str, str]
    git_sha: str
    git_dirty: bool
    model: str = Field("", description="what quality by decode length was measured with; empty: not asked for")
    settings: SceneSettings
    scenes: list[Scene]

    @model_validator(mode="after")
    def _check_passed(self) -> Self:
        if self.passed != audit_passed(self.scenes):
            raise ValueError(f"passed={self.passed} contradicts the findings of the scenes")
        return self

    def findings(self, severity: str) -> list[tuple[str, SceneFinding]]:
        """Return the findings of one severity, each with the name of its scene."""
        return [(scene.name, found) for scene in self.scenes for found in scene.findings if found.severity == severity]

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        errors, warnings = (_count(len(self.findings(severity)), severity) for severity in ("error", "warning"))
        ran = sum(scene.outcome != "not run" for scene in self.scenes)
        if self.passed:
            return f"passed: {_count(ran, 'scene')}, {_count(len(self.findings('info')), 'fact')}, {warnings}"
        return f"failed: {errors} in {_count(ran, 'scene')}" if ran else "failed: no scene was run"


def audit_passed(scenes: Sequence[Scene]) -> bool:
    """Return whether at least one scene ran and none found an error."""
    return any(scene.outcome == "passed" for scene in scenes) and all(scene.outcome != "failed" for scene in scenes)


class Notes:
    """What a scene writes down while it runs.

    Args:
        command: What shows the scene again.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self.findings: list[SceneFinding] = []
        self.curves: list[Curve] = []

    def check(self, name: str, wrong: str, right: str, **numbers: float) -> None:
        """Write down an error when ``wrong`` says something, else what is ``right``."""
        self._write(name, "error" if wrong else "info", wrong or right, numbers)

    def info(self, name: str, evidence: str, **numbers: float) -> None:
        """Write down a fact that is neither right nor wrong."""
        self._write(name, "info", evidence, numbers)

    def warn(self, name: str, evidence: str, **numbers: float) -> None:
        """Write down what a user should know."""
        self._write(name, "warning", evidence, numbers)

    def _write(
        self, name: str, severity: Literal["info", "warning", "error"], evidence: str, numbers: Mapping[str, float]
    ) -> None:
        found = SceneFinding(name=name, severity=severity, evidence=evidence, command=self._command, numbers=dict(numbers))
        self.findings.append(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
