"""What the terminal shows: a table that fits, a verdict with its reasons, and no control character from outside."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import prefect
import pytest
from rich.console import Console

from flows import nightly
from flows.cli.terminal import Bars, Lines, as_json, logging_to, progress, show
from flows.nightly import NightResult
from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.run import accelerator
from tasks.run.plan import Plan

HOSTILE = "\x1b[2J\x1b]0;title\x07 [bold]x[/bold] \u202eevil"


def came_to(night):
    verdict = judge(night, NightlyConfig(specs=("full",)))
    return NightResult(
        night=night, verdict=verdict, page=Path("/t/report.html"), experiment_id="1", run_id="p", cell_ids=("a", "b")
    )


def shown(result, width, tracking_dir=Path("mlruns")):
    console = Console(file=io.StringIO(), width=width)
    show(console, result, tracking_dir)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_the_table_fits_the_terminal(make_result, make_night, width):
    text = shown(came_to(make_night(make_result("full"), make_result())), width)
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(len(line) for line in table) <= width
    assert ("resident" in text) == (width >= 100)


def test_the_verdict_its_reasons_and_where_to_look_are_printed(make_result, make_night):
    night = make_night(make_result("full"), make_result(kl_mean=0.5), seconds={"cells": 61.0})
    text = shown(came_to(night), 160, Path("other dir"))
    assert "failed: 1 of 6 checks did not pass" in text
    assert "quality.kl_mean is 0.5 nats, above the limit of 0.01 nats" in text
    assert "took cells 1 min 01 s" in text
    assert "/t/report.html" in text
    assert "kivi ui --tracking-dir 'other dir'" in text
    assert "http://127.0.0.1:5050/#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D" in text


def test_with_a_team_s_server_it_is_the_server_where_to_look(make_result, make_night, monkeypatch):
    monkeypatch.setenv("KIVI_TRACKING_URI", "http://me:secret@lab:5050/")
    text = shown(came_to(make_night(make_result("full"), make_result())), 160)
    assert "MLflow  http://[user]@lab:5050\n" in text and "http://[user]@lab:5050/#/experiments" in text
    assert "secret" not in text and "kivi ui" not in text


def test_text_from_outside_moves_no_cursor_and_is_no_markup(make_result, make_night):
    text = shown(came_to(make_night(make_result(model=HOSTILE, prompt_set=HOSTILE), HOSTILE, name=HOSTILE)), 200)
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\\x1b[2J" in text
    assert "[bold]x[/bold]" in text


def test_a_model_column_appears_when_cells_differ(make_result, make_night):
    same = shown(came_to(make_night(make_result("full"), make_result())), 160)
    different = shown(came_to(make_night(make_result(), make_result(prompt_set="retrieval"))), 160)
    assert "model and prompts" not in same
    assert "embedded × humaneval" in same  # in the title
    assert "model and prompts" in different


def test_bars_for_a_terminal_and_lines_for_a_pipe():
    assert isinstance(progress(Console(file=io.StringIO(), force_terminal=True)), Bars)
    assert isinstance(progress(Console(file=io.StringIO())), Lines)


def test_a_pipe_gets_a_line_a_cell(make_result, make_night):
    outcomes = make_night(make_result(), HOSTILE).outcomes
    console = Console(file=io.StringIO(), width=40)
    with progress(console) as lines:
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
    with progress(console) as bars:
        bars.planned(Plan(cells=(outcome.cell,)))
        bars.step(outcome.cell.label, "score", 1, 2)
        bars._progress.refresh()
        bars.finished(outcome)
    text = console.file.getvalue()
    assert "0/1" in text
    assert "score: kivi-roundtrip" in text
    assert "1/2" in text


def test_json_holds_verdict_results_and_places(make_result, make_night):
    printed = as_json(came_to(make_night(make_result(), "no memory")), Path("mlruns"))
    assert printed["passed"] is False
    assert [cell["verdict"] for cell in printed["cells"]] == ["pass", "fail"]
    assert printed["cells"][0]["result"]["quality"]["kl_mean"] == 0.0027
    assert printed["cells"][1]["error"] == "no memory"
    assert printed["look"]["MLflow"] == "kivi ui"


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
