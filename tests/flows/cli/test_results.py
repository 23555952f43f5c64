"""What the terminal shows: a table that fits, a verdict with its reasons, and no control character from outside."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

import flows
from flows.cli.output import print_json
from flows.cli.results import fields, require_writable, show, write_summaries
from flows.results import NightResult
from tasks.config import ConfigError, NightlyConfig, load_config
from tasks.judge.gate import judge
from tasks.report.night import build_report
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


MATRIX = load_config(Path(flows.__file__).parent / "configs" / "nightly.yaml").specs


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_standard_table_fits_without_breaking_a_name(make_result, make_night, width):
    results = [make_result(spec.text, kl_mean=0.011) for spec in MATRIX]
    text = shown(came_to(make_night(*results, "out of memory")), width)
    assert max(len(line) for line in text.splitlines()[: 8 + len(MATRIX)]) <= width
    for spec in MATRIX:
        assert re.search(rf"^{re.escape(spec.text)} ", text, re.MULTILINE), text
    assert ("perplexity" in text) == (width >= 160)
    assert "marginal: KL" in text and "verdict" not in text


def test_what_a_terminal_calls_a_column_is_what_other_tables_call_it(make_result, make_night):
    night = make_night(make_result("full"), make_result())
    lines = shown(came_to(night), 300).splitlines()
    page = build_report(night, judge(night, NightlyConfig(specs=("full",)))).markdown
    (header,) = (line for line in page.splitlines() if line.startswith("| cache"))
    top, middle, bottom = (line.ljust(300) for line in lines[2:5])
    for name in header.strip("| ").split(" | "):
        *_, last = name.split(" ")
        assert last in bottom, (name, top, middle, bottom)


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


def test_each_model_and_prompt_set_has_a_table_of_its_own(make_result, make_night):
    same = shown(came_to(make_night(make_result("full"), make_result())), 160)
    different = shown(came_to(make_night(make_result(), make_result(prompt_set="retrieval"))), 160)
    assert same.count("nightly 2026-11-29: embedded × ") == 1
    assert "nightly 2026-11-29: embedded × humaneval" in different and "nightly 2026-11-29: embedded × retrieval" in different


def test_json_holds_verdict_results_and_places(make_result, make_night, capsys):
    print_json(fields(came_to(make_night(make_result(), "no memory")), Path("mlruns")))
    printed = json.loads(capsys.readouterr().out)
    assert printed["passed"] is False
    assert [cell["verdict"] for cell in printed["cells"]] == ["pass", "fail"]
    assert printed["cells"][0]["result"]["quality"]["kl_mean"] == 0.0027
    assert printed["cells"][1]["error"] == "no memory"
    assert printed["look"]["MLflow"] == "kivi ui"


def test_a_terminal_gets_links_to_click_on_and_none_to_compare_one_cell(make_result, make_night):
    result = came_to(make_night(make_result()))
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    show(console, result, Path("mlruns"))
    text = console.file.getvalue()
    assert "\x1b]8;" in text and ";http://127.0.0.1:5050/#/experiments/1/runs/p\x1b\\" in text
    one = result.model_copy(update={"logged": Logged(experiment_id="1", run_id="p", child_ids=("a",))})
    assert "compare" not in shown(one, 80) and "compare" in shown(result, 80)


def test_a_ci_job_gets_the_table_added_and_a_test_a_cell(make_result, make_night, tmp_path):
    result = came_to(make_night(make_result("full"), make_result(kl_mean=0.5)))
    summary, junit = tmp_path / "summary.md", tmp_path / "night.xml"
    summary.write_text("an earlier step\n")
    for file in (summary, junit):
        require_writable(file)
    write_summaries(result, summary, junit)
    assert summary.read_text().startswith("an earlier step\n### nightly 2026-11-29: failed: 1 of ")
    assert junit.read_text().count("<testcase") == 2 and junit.read_text().count("<failure") == 1


def test_a_summary_that_cannot_be_written_is_refused_before_the_night(tmp_path):
    for file in (tmp_path, tmp_path / "no such folder" / "summary.md"):
        with pytest.raises(ConfigError, match="cannot be written; give a file in a folder that is there"):
            require_writable(file)
