"""What the command line shows: progress while a night runs, its table and its verdict at the end."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from flows.cli.commands import MLRUNS
from flows.nightly import NightResult
from tasks.paths import UI_ADDRESS, compare_path, run_path
from tasks.report.table import HEADINGS, Row, columns, rows, show_seconds
from tasks.run.night import Outcome
from tasks.run.plan import Plan
from tasks.sanitize import redact, visible
from tasks.tracking.store import EXPERIMENT, TRACKING_URI

STYLES = {"pass": "green", "good": "green", "marginal": "yellow", "fail": "red", "failed": "red", "bad": "red"}
NARROW = 100  # columns below which the table keeps only what fits
NARROW_COLUMNS = ("cache", "verdict", "compression", "kl", "tier", "flips", "on")


class Bars:
    """Two bars, one over the cells and one inside the running cell; the context shows and removes them."""

    def __init__(self, console: Console) -> None:
        text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        bar = BarColumn(bar_width=20)
        self._progress = Progress(
            text, bar, MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True, expand=True
        )
        self._cells = self._progress.add_task("preparing", total=None)
        self._steps = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def planned(self, plan: Plan) -> None:
        self._progress.update(self._cells, description="cells", total=len(plan.cells))

    def step(self, label: str, stage: str, done: int, total: int) -> None:
        text = escape(visible(f"{stage}: {label}"))
        self._progress.update(self._steps, description=text, completed=done, total=total, visible=True)

    def finished(self, outcome: Outcome) -> None:
        self._progress.advance(self._cells)
        self._progress.update(self._steps, visible=False)
        if outcome.error:
            self._progress.console.print(Text(_line(outcome), style="red"))


class Lines:
    """A line a cell, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._done = self._total = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def planned(self, plan: Plan) -> None:
        self._total = len(plan.cells)

    def step(self, label: str, stage: str, done: int, total: int) -> None:
        pass

    def finished(self, outcome: Outcome) -> None:
        self._done += 1
        self._console.print(Text(f"{self._done}/{self._total} {_line(outcome)}"), soft_wrap=True)


def progress(console: Console) -> Bars | Lines:
    """Return bars for a terminal, lines for anything else."""
    return Bars(console) if console.is_terminal else Lines(console)


@contextmanager
def logging_to(console: Console) -> Iterator[None]:
    """Show what the project's own code logs, such as what it waits for; Prefect's own lines stay out of the way."""
    handler = _ConsoleHandler(console)
    handler.addFilter(_OwnRecords())
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs", "tasks", "flows", "kivi")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    """Prints through the console, which keeps the bars below what it prints."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(Text(visible(record.getMessage())), soft_wrap=True)


class _OwnRecords(logging.Filter):
    """Lets pass warnings of this project's modules, and all that the accelerator's lock says."""

    def filter(self, record: logging.LogRecord) -> bool:
        path = Path(record.pathname)
        own = Path(__file__).resolve().parents[2] in path.resolve().parents and "site-packages" not in path.parts
        return own and (record.levelno >= logging.WARNING or path.stem == "accelerator")


def show(console: Console, result: NightResult, tracking_dir: Path) -> None:
    """Print the table, the verdict with its reasons, and where to look."""
    night, verdict = result.night, result.verdict
    console.print()
    console.print(table(rows(night, verdict), night.title, narrow=console.width < NARROW))
    for skipped in night.skipped:
        console.print(Text(f"skipped {visible(skipped.what)}: {visible(skipped.why)}"), soft_wrap=True)
    spent = ", ".join(f"{part} {show_seconds(seconds)}" for part, seconds in night.seconds.items())
    reused = sum(outcome.reused for outcome in night.outcomes)
    found = f"{reused} of {len(night.outcomes)} cells were measured earlier" if reused else ""
    said = "; ".join(part for part in (f"took {spent}" if spent else "", found) if part)
    if said:
        console.print(Text(said), soft_wrap=True)
    console.print(Text(verdict.headline, style="bold green" if verdict.passed else "bold red"))
    for reason in verdict.reasons:
        console.print(Text(f"  {visible(reason)}"), soft_wrap=True)
    for remark in verdict.comparison.remarks:
        console.print(Text(f"  {visible(remark)}", style="dim"), soft_wrap=True)
    for name, where in where_to_look(result, tracking_dir).items():
        console.print(Text(f"{name:8}{where}"), soft_wrap=True)


def where_to_look(result: NightResult, tracking_dir: Path) -> dict[str, str]:
    """Return where a night can be looked at."""
    opened, address = mlflow_pages(tracking_dir)
    return {
        "report": str(result.page),
        "MLflow": opened,
        "night": f"{address}/{run_path(result.experiment_id, result.run_id)}",
        "compare": f"{address}/{compare_path(result.experiment_id, result.cell_ids)}",
    }


def mlflow_pages(tracking_dir: Path) -> tuple[str, str]:
    """Return what opens MLflow's pages and their address: the team's server where there is one, else ``kivi ui``."""
    if server := redact(os.environ.get(TRACKING_URI, "")).rstrip("/"):
        return server, server
    chosen = "" if tracking_dir == MLRUNS else f" --tracking-dir {shlex.quote(str(tracking_dir))}"
    return f"kivi ui{chosen}", UI_ADDRESS


def table(lines: list[Row], title: str, *, narrow: bool) -> Table:
    """Return the table of a night; a narrow one has fewer columns."""
    names = [name for name in columns(lines) if not narrow or name in NARROW_COLUMNS]
    shown = Table(title=Text(_title(lines, title)), title_justify="left")
    for name in names:
        left = name in {"cache", "on", "tier", "verdict"}
        shown.add_column(getattr(HEADINGS, name), justify="left" if left else "right", overflow="fold")
    for line in lines:
        texts = [getattr(line, name) for name in names]
        shown.add_row(*[Text(text, style=STYLES.get(text, "")) for text in texts])
    return shown


def as_json(result: NightResult, tracking_dir: Path) -> dict[str, Any]:
    """Return the result of a command for ``--json``."""
    cells = [
        {
            "label": outcome.cell.label,
            "cell_key": outcome.cell.key,
            "spec": outcome.cell.spec.slug,
            "verdict": result.verdict.of(outcome.cell.key),
            "error": outcome.error,
            "reused": outcome.reused,
            "result": outcome.result.model_dump(mode="json") if outcome.result else None,
        }
        for outcome in result.night.outcomes
    ]
    return {
        "night": result.night.title,
        "passed": result.verdict.passed,
        "reasons": list(result.verdict.reasons),
        "improvements": [change.sentence for change in result.verdict.comparison.improvements],
        "notes": list(result.verdict.comparison.notes),
        "cells": cells,
        "skipped": [skipped.model_dump() for skipped in result.night.skipped],
        "seconds": result.night.seconds,
        "experiment": EXPERIMENT,
        "run_id": result.run_id,
        "look": where_to_look(result, tracking_dir),
    }


def _title(lines: list[Row], title: str) -> str:
    shared = {line.on for line in lines}
    return visible(title) + (f": {shared.pop()}" if len(shared) == 1 else "")


def _line(outcome: Outcome) -> str:
    label = visible(outcome.cell.label)
    if outcome.error:
        return f"{label}: failed: {visible(outcome.error)}"
    if outcome.reused or outcome.result is None:
        return f"{label}: measured earlier"
    return f"{label}: measured in {show_seconds(sum(outcome.result.provenance.seconds.values()))}"
