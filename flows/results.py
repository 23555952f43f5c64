"""The results of flows, and the Prefect state that says whether a result passed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from kivi.measure.audit import AuditReport
from kivi.measure.backends.comparison import ComparisonResult
from tasks.config import Config
from tasks.judge.gate import Verdict
from tasks.report.comparison import headline
from tasks.run.night import Night
from tasks.tracking.runs import Logged
from tasks.tune.answer import Tuning

PROBLEMS = 5  # sentences in a flow's message; the report has all


class NightResult(Config):
    """A night with its verdict, its page, and its runs in MLflow."""

    night: Night
    verdict: Verdict
    page: Path
    logged: Logged

    @property
    def passed(self) -> bool:
        return self.verdict.passed

    @property
    def headline(self) -> str:
        return self.verdict.headline

    @property
    def problems(self) -> list[str]:
        return list(self.verdict.reasons)


class Checked(Config):
    """An audit, a comparison or a tuning, its runs in MLflow, and the folder of what it wrote, if it did."""

    result: AuditReport | ComparisonResult | Tuning
    logged: Logged
    folder: Path | None = None

    @property
    def passed(self) -> bool:
        return self.result.passed

    @property
    def headline(self) -> str:
        return headline(self.result) if isinstance(self.result, ComparisonResult) else self.result.headline

    @property
    def problems(self) -> list[str]:
        if isinstance(self.result, ComparisonResult):
            return self.result.problems or ["no parity check was run"]
        if isinstance(self.result, Tuning):
            return [f"{slug}: {why}" for slug, why in self.result.failed.items()]
        return [f"{check}, {found.name}: {found.evidence}" for check, found in self.result.findings("error")]


Result = TypeVar("Result", bound=NightResult | Checked)


def final_state(result: Result) -> State[Result]:
    """Return Completed for a result that passed, else Failed with the first problems in its message."""
    if result.passed:
        return Completed(message=result.headline, data=result)
    sentences = result.problems
    if len(sentences) > PROBLEMS:
        sentences = [*sentences[:PROBLEMS], f"and {len(sentences) - PROBLEMS} more"]
    return Failed(message="\n".join([result.headline, *sentences]), data=result)
