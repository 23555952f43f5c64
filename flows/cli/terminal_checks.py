"""What the terminal shows of a comparison of backends and of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.audit import Audited
from flows.cli.terminal import mlflow_pages
from flows.compare import Compared
from tasks.paths import compare_path, run_path
from tasks.report.comparison import headline, model_table, parity_table, speed_table
from tasks.report.table import show_seconds
from tasks.sanitize import visible
from tasks.tracking.runs import Logged

STYLES = {"passed": "green", "pass": "green", "failed": "red", "fail": "red", "error": "red", "warning": "yellow"}


def show_comparison(console: Console, compared: Compared, tracking_dir: Path) -> None:
    """Print parity and speed of each spec, what was not run, the verdict, and where to look."""
    result = compared.result
    for spec in result.specs:
        console.print(_table(f"{spec.spec.slug}: parity with the definition", parity_table(spec)))
        if spec.speed:
            console.print(_table(f"{spec.spec.slug}: speed on {result.device}", speed_table(spec)))
        if spec.model is not None:
            console.print(_table(f"{spec.spec.slug}: {spec.model.model}, {spec.model.dtype}", model_table(spec)))
    for line in result.not_run:
        _print(console, line, "yellow")
    _print(console, f"took {show_seconds(result.seconds)}")
    _print(console, headline(result), "bold green" if result.passed else "bold red")
    for problem in result.problems:
        _print(console, f"  {problem}")
    _where(console, compared.logged, tracking_dir)


def show_audit(console: Console, audited: Audited, tracking_dir: Path) -> None:
    """Print a row a check, the errors and warnings with their commands, the verdict, and where to look."""
    report = audited.report
    rows = [["check", "question", "outcome", "took"]]
    rows += [[check.name, check.question, check.outcome, show_seconds(check.seconds)] for check in report.checks]
    console.print(_table(f"audit of {report.spec.slug}", rows))
    for severity in ("warning", "error"):
        for name, found in report.findings(severity):
            _print(console, f"{severity}: {name}, {found.name}: {found.evidence}", STYLES[severity])
            _print(console, f"  again: {found.command}")
    if len(report.checks) == 1:  # whoever asks one question wants the evidence
        for _, found in report.findings("info"):
            _print(console, f"{found.name}: {found.evidence}")
    for check in report.checks:
        if check.not_run:
            _print(console, f"{check.name}: {check.not_run}", "yellow")
    _print(console, f"took {show_seconds(report.seconds)}")
    _print(console, report.headline, "bold green" if report.passed else "bold red")
    _where(console, audited.logged, tracking_dir)


def _where(console: Console, logged: Logged, tracking_dir: Path) -> None:
    opened, address = mlflow_pages(tracking_dir)
    _print(console, f"MLflow  {opened}")
    _print(console, f"run     {address}/{run_path(logged.experiment_id, logged.run_id)}")
    if len(logged.child_ids) > 1:
        _print(console, f"compare {address}/{compare_path(logged.experiment_id, logged.child_ids)}")


def _table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    header, *lines = rows
    shown = Table(title=Text(visible(title)), title_justify="left")
    for name in header:
        shown.add_column(name, overflow="fold")
    for line in lines:
        shown.add_row(*[Text(visible(text), style=STYLES.get(text, "")) for text in line])
    return shown


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style=style), soft_wrap=True)
