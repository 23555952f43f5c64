"""A night for a CI job: the Markdown that the job's page shows, and JUnit's XML, a cell a test."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

from tasks.judge.gate import Verdict
from tasks.report.table import columns, heading, rows
from tasks.run.night import Night, Outcome
from tasks.sanitize import markdown, visible


def summary_markdown(night: Night, verdict: Verdict) -> str:
    """Return verdict, reasons and table as Markdown, for e.g. ``$GITHUB_STEP_SUMMARY``."""
    lines = rows(night, verdict)
    names = columns(lines)
    table = [[heading(name) for name in names], ["---"] * len(names), *[_cells(line._asdict(), names) for line in lines]]
    text = [f"### {markdown(night.title)}: {markdown(verdict.headline)}", ""]
    text += [f"- {markdown(reason)}" for reason in verdict.reasons]
    text += ["", *[f"| {' | '.join(row)} |" for row in table], ""]
    text += [f"- skipped {markdown(skipped.what)}: {markdown(skipped.why)}" for skipped in night.skipped]
    return "\n".join([*text, ""])


def junit_xml(night: Night, verdict: Verdict) -> str:
    """Return JUnit's XML: a test a cell, an error where it was not measured, a failure where it did not pass."""
    suite = ET.Element("testsuite", name=visible(night.title), tests=str(len(night.outcomes)))
    for outcome in night.outcomes:
        cell = outcome.cell
        took = sum(outcome.result.provenance.seconds.values()) if outcome.result else 0.0
        where = visible(f"{cell.model.name} × {cell.prompt_set}")
        case = ET.SubElement(suite, "testcase", classname=where, name=cell.spec.text, time=f"{took:.3f}")
        for kind, reason in _problems(outcome, verdict):
            ET.SubElement(case, kind, message=visible(reason))
    for kind in ("error", "failure"):
        suite.set(f"{kind}s", str(sum(case.find(kind) is not None for case in suite)))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cells(line: dict[str, str], names: list[str]) -> list[str]:
    return [f"`{line[name]}`" if name == "cache" else markdown(line[name]) for name in names]


def _problems(outcome: Outcome, verdict: Verdict) -> Iterator[tuple[str, str]]:
    if outcome.error or outcome.result is None:
        yield "error", outcome.error or "it has no result"
        return
    for check in verdict.checks:
        if check.cell_key == outcome.cell.key and not check.passed:
            yield "failure", check.reason
