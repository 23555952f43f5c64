"""What the terminal shows: a table that fits, a verdict with its reasons, and no control character from outside."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.output import print_json
from flows.cli.results import fields, show
from flows.results import NightResult
from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.tracking.runs import Logged

HOSTILE = "\x1b[2J\x1b]0;title\x07 [bold]x[/bold] \u202eevil"


def came_to(night):
    verdict = judge(night, NightlyConfig(specs=("full",)))
    logged = Logged(experiment_id="1", run_id="p", child_ids=("a", "b"))
    return NightResult(night=night, verdict=verdict, page=Path("/t/report.html"), logged=logged)


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


def test_json_holds_verdict_results_and_places(make_result, make_night, capsys):
    print_json(fields(came_to(make_night(make_result(), "no memory")), Path("mlruns")))
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is False
    assert [cell["verdict"] for cell in printed["cells"]] == ["pass", "fail"]
    assert printed["cells"][0]["result"]["quality"]["kl_mean"] == 0.0027
    assert printed["cells"][1]["error"] == "no memory"
    assert printed["look"]["MLflow"] == "kivi ui"
