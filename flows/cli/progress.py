"""What the terminal shows while a flow runs: its cells, and what the project's own code logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from flows import interruption
from flows.cli.output import print_line
from flows.progress import Listener
from tasks.report.table import show_seconds
from tasks.run.night import Outcome
from tasks.run.plan import Plan
from tasks.sanitize import visible

LINES = 10  # of a tuning, where there is no bar, beside the first, which says how long it takes


class Progress(Listener):
    """On a terminal two bars, over the cells and inside the running cell, while the context is open; else a line a cell."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._cells = self._bars.add_task("preparing", total=None)
        self._steps = self._bars.add_task("", total=None, visible=False)
        self._done = self._total = 0
        self._told = False
        self._context = ExitStack()

    def __enter__(self) -> Progress:
        self._context.enter_context(interruption.clearing(self._bars.stop))
        self._context.enter_context(self._bars)
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()

    def planned(self, plan: Plan) -> None:
        self._total = len(plan.cells)
        self._bars.update(self._cells, description="cells", total=self._total)

    def due(self, done: int, total: int, seconds: float) -> None:
        text = f"{done} of {total} measurements, about {show_seconds(round(seconds))} left"
        self._bars.update(self._cells, description=text, completed=done, total=total)
        lines = 0 if self._console.is_terminal else LINES
        if (seconds and done > 1 and not self._told) or done * lines // total > self._done * lines // total:
            self._told = self._told or seconds > 0
            print_line(self._console, text)
        self._done = done

    def step(self, label: str, stage: str, done: int, total: int) -> None:
        text = escape(visible(f"{stage}: {label}"))
        self._bars.update(self._steps, description=text, completed=done, total=total, visible=True)

    def finished(self, outcome: Outcome) -> None:
        self._done += 1
        self._bars.advance(self._cells)
        self._bars.update(self._steps, visible=False)
        if not self._console.is_terminal:
            print_line(self._console, f"{self._done}/{self._total} {_line(outcome)}")
        elif outcome.error:
            print_line(self._console, _line(outcome), "red")


def _line(outcome: Outcome) -> str:
    label = outcome.cell.label
    if outcome.error:
        return f"{label}: failed: {outcome.error}"
    if outcome.reused or outcome.result is None:
        return f"{label}: measured earlier"
    return f"{label}: measured in {show_seconds(sum(outcome.result.provenance.seconds.values()))}"


@contextmanager
def logging_to(console: Console) -> Iterator[None]:
    """Show what the project's own code logs, such as what it waits for; Prefect's own lines stay out of the way."""
    handler = _ConsoleHandler(console)
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs", "tasks", "flows", "kivi")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _ConsoleHandler(logging.Handler):
    """Prints warnings of this project's modules, and all that the accelerator's lock says, above the bars."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def filter(self, record: logging.LogRecord) -> bool:
        path = Path(record.pathname)
        own = Path(__file__).resolve().parents[2] in path.resolve().parents and "site-packages" not in path.parts
        return own and (record.levelno >= logging.WARNING or path.stem == "accelerator")

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self._console, record.getMessage())
