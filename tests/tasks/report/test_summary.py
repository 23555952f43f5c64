"""What a CI job shows of a night: the table as Markdown, and a test a cell."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.report.summary import junit_xml, summary_markdown
from tasks.run.plan import Skipped

HOSTILE = "</failure> | <b> \x1b[2J & `x`"


def judged(night):
    return night, judge(night, NightlyConfig(specs=("full",)))


def test_the_markdown_has_verdict_reasons_and_a_row_a_cell(make_result, make_night):
    skipped = (Skipped(what="kivi-k2v2-g32-r128-metal", why="backend metal: no GPU"),)
    night = make_night(make_result("full"), make_result(kl_mean=0.5), HOSTILE, skipped=skipped)
    text = summary_markdown(*judged(night))
    lines = text.splitlines()
    assert lines[0].startswith("### nightly 2026-11-29: failed: 2 of ")
    assert sum(line.startswith("| `") for line in lines) == 3
    assert len({line.count(" | ") for line in lines if line.startswith("|")}) == 1
    assert "above the limit of 0.01 nats" in text and "backend metal: no GPU" in text
    assert "\x1b" not in text and "<b>" not in text


def test_the_xml_has_a_test_a_cell_with_what_did_not_pass(make_result, make_night):
    text = junit_xml(*judged(make_night(make_result("full"), make_result(kl_mean=0.5), HOSTILE)))
    (suite,) = ET.fromstring(text)  # noqa: S314  our own
    assert {name: suite.get(name) for name in ("tests", "errors", "failures")} == {"tests": "3", "errors": "1", "failures": "1"}
    full, bad, failed = suite
    assert (full.get("classname"), full.get("name"), full.get("time")) == ("embedded × humaneval", "full", "20.500")
    assert len(full) == 0
    assert "quality.kl_mean is 0.5 nats" in bad.find("failure").get("message")
    assert "</failure> | <b>" in failed.find("error").get("message")
