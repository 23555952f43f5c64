"""The typed, versioned result of an audit: its checks and their findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import AliasChoices, AwareDatetime, BeforeValidator, Field, model_validator

from kivi.measure.records import Record
from kivi.measure.results import Finding
from kivi.measure.settings import Settings
from kivi.spec import CacheSpec


class AuditSettings(Settings):
    """How long the checks are. The spec adds the tokens that fill its window."""

    heads: int = Field(4, ge=1, description="KV heads of the caches that are audited")
    head_dim: int = Field(64, ge=8, description="channels of a key and of a value")
    decode_steps: int = Field(200, ge=1, description="decode steps at each of which bytes are compared")
    history: int = Field(1024, ge=1, description="tokens streamed to see whether old codes change")
    seed: int = Field(0, ge=0, description="seed of keys, values and the sizes of calls")


class CheckFinding(Finding):
    """One finding of a check: a sentence, its numbers, and the command that runs the check again."""

    numbers: dict[str, float] = Field({}, description="the evidence in numbers, units in their names")


class Curve(Record):
    """A number by step or token, for a figure and for MLflow's charts."""

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


# Names of checks in reports of version 0.1.0. Its check `seed` is there no more; a report that has one is read all the same.
RENAMED = {"books": "bytes", "witness": "memory"}


class Check(Record):
    """One question about the cache, and its answer."""

    name: Annotated[str, BeforeValidator(lambda name: RENAMED.get(name, name))]
    question: str
    seconds: float
    findings: list[CheckFinding]
    curves: list[Curve] = Field([])
    not_run: str = Field("", description="why the check was not run")
    details: str = Field("", description="the traceback, when the cache raised something")

    @property
    def outcome(self) -> Literal["passed", "failed", "not run"]:
        """Passed where it ran and found no error."""
        if any(finding.severity == "error" for finding in self.findings):
            return "failed"
        return "not run" if self.not_run else "passed"


class AuditReport(Record):
    """An audit of one cache: the checks, their findings, and the machine."""

    schema_version: Literal[1] = 1
    kind: Literal["kivi-audit"] = "kivi-audit"
    spec: CacheSpec
    cache: str = Field(description="class of the cache that was audited")
    backend: str = Field(description="the backend that ran, and why that one")
    passed: bool = Field(description="whether no check found an error, and at least one ran")
    started: AwareDatetime
    seconds: float
    device: str = Field(description="hardware by kind, never by host name")
    blas: str
    packages: dict[str, str]
    git_sha: str
    git_dirty: bool
    model: str = Field("", description="what quality by decode length was measured with; empty: not asked for")
    settings: AuditSettings
    checks: list[Check] = Field(
        validation_alias=AliasChoices("checks", "scenes"), description="`scenes` in reports of version 0.1.0"
    )

    @model_validator(mode="after")
    def _check_passed(self) -> Self:
        if self.passed != audit_passed(self.checks):
            raise ValueError(f"passed={self.passed} contradicts the findings of the checks")
        return self

    def findings(self, severity: str) -> list[tuple[str, CheckFinding]]:
        """Return the findings of one severity, each with the name of its check."""
        return [(check.name, found) for check in self.checks for found in check.findings if found.severity == severity]

    @property
    def headline(self) -> str:
        """The verdict in a sentence."""
        errors, warnings = (_count(len(self.findings(severity)), severity) for severity in ("error", "warning"))
        ran = sum(check.outcome != "not run" for check in self.checks)
        if self.passed:
            return f"passed: {_count(ran, 'check')}, {_count(len(self.findings('info')), 'fact')}, {warnings}"
        return f"failed: {errors} in {_count(ran, 'check')}" if ran else "failed: no check was run"


def audit_passed(checks: Sequence[Check]) -> bool:
    """Return whether at least one check ran and none found an error."""
    return any(check.outcome == "passed" for check in checks) and all(check.outcome != "failed" for check in checks)


class Notes:
    """The findings and curves of a check that is running.

    Args:
        command: The command that runs the check again.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self.findings: list[CheckFinding] = []
        self.curves: list[Curve] = []

    def check(self, name: str, wrong: str, right: str, **numbers: float) -> None:
        """Add an error with the sentence ``wrong``, or, where it is empty, an info with ``right``."""
        self._add(name, "error" if wrong else "info", wrong or right, numbers)

    def info(self, name: str, evidence: str, **numbers: float) -> None:
        """Add a fact that is neither right nor wrong."""
        self._add(name, "info", evidence, numbers)

    def warn(self, name: str, evidence: str, **numbers: float) -> None:
        """Add a warning."""
        self._add(name, "warning", evidence, numbers)

    def _add(
        self, name: str, severity: Literal["info", "warning", "error"], evidence: str, numbers: Mapping[str, float]
    ) -> None:
        found = CheckFinding(name=name, severity=severity, evidence=evidence, command=self._command, numbers=dict(numbers))
        self.findings.append(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
