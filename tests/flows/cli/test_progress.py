"""What the terminal shows while a flow runs: bars, or a line a cell, and what the project's own code logs."""

from __future__ import annotations

import io
import logging

import prefect
from rich.console import Console

from flows import nightly
from flows.cli.progress import Progress, logging_to
from tasks.run import accelerator
from tasks.run.plan import Plan

HOSTILE = "\x1b[2J\x1b]0;title\x07 [bold]x[/bold] \u202eevil"


def test_a_pipe_gets_a_line_a_cell(make_result, make_night):
    outcomes = make_night(make_result(), HOSTILE).outcomes
    console = Console(file=io.StringIO(), width=40)
    with Progress(console) as lines:
        lines.planned(Plan(cells=tuple(outcome.cell for outcome in outcomes)))
        for outcome in outcomes:
            lines.step(outcome.cell.label, "score", 1, 2)
            lines.finished(outcome)
    first, second = console.file.getvalue().splitlines()
    assert first == "1/2 kivi-roundtrip-k4v4-g32-r128-mlx on embedded × humaneval: measured in 20.5 s"
    assert second.startswith("2/2 ")
    assert "\x1b" not in second


def test_a_terminal_gets_a_bar_over_cells_and_one_inside_the_cell(make_result, make_night):
    (outcome,) = make_night(make_result()).outcomes
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Progress(console) as bars:
        bars.planned(Plan(cells=(outcome.cell,)))
        bars.step(outcome.cell.label, "score", 1, 2)
        bars._bars.refresh()
        bars.finished(outcome)
    text = console.file.getvalue()
    assert "0/1" in text
    assert "score: kivi-roundtrip" in text
    assert "1/2" in text


def test_logs_show_what_the_project_says_and_not_what_prefect_does(monkeypatch):
    console = Console(file=io.StringIO(), width=40)
    logger = logging.getLogger("prefect.task_runs")
    record = {"name": "prefect.task_runs", "lineno": 1, "args": (), "exc_info": None}
    monkeypatch.setattr(logger, "handlers", [])  # Prefect's own want a server
    for pathname, level, message in (
        (accelerator.__file__, logging.INFO, "waits for the accelerator, which process 7 has \x1b[2J"),
        (nightly.__file__, logging.INFO, "found"),
        (nightly.__file__, logging.WARNING, "a result was truncated"),
        (prefect.__file__, logging.ERROR, "Finished in state Failed"),
    ):
        with logging_to(console):
            logger.handle(logging.LogRecord(pathname=pathname, level=level, msg=message, **record))
    assert console.file.getvalue().splitlines() == [
        "waits for the accelerator, which process 7 has \\x1b[2J",
        "a result was truncated",
    ]
