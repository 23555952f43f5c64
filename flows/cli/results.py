"""What the command line shows of a finished night, comparison or audit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from flows.cli.commands import FAILED, MLRUNS, PASSED
from flows.cli.output import STYLES, fits, print_json, print_line, print_link, result_console, table
from flows.results import Checked, NightResult
from kivi.files import write_whole
from kivi.measure.audit import AuditReport
from kivi.measure.backends.comparison import ComparisonResult
from tasks.config import ConfigError
from tasks.paths import UI_ADDRESS, compare_path, run_path
from tasks.report.comparison import model_table, parity_table, speed_table
from tasks.report.summary import junit_xml, summary_markdown
from tasks.report.table import HEADINGS, Row, columns, rows, shared_backend, show_seconds
from tasks.report.tuning import HEADINGS as TUNING
from tasks.report.tuning import rows as tuning_rows
from tasks.sanitize import redact
from tasks.tracking.store import EXPERIMENT, TRACKING_URI
from tasks.tune.answer import RECOMMENDED, Tuning

LESS_NEEDED = ("interval", "bytes_32768", "perplexity", "speed", "smaller", "answers", "decode")  # first what goes first
TEXTS = ("cache", "tier", "gate")  # columns of a night that hold no numbers
TUNING_NUMBERS = ("bits", "bytes a token", "flips", "decode")
TUNING_WIDTH = 100  # columns below which a table of a tuning leaves out:
TUNING_WIDE = ("family", "flips", "decode")


def finish(result: NightResult | Checked, tracking_dir: Path, as_json: bool) -> NoReturn:
    """Show the result of a command, and end with its exit code."""
    with result_console(as_json) as console:
        show(console, result, tracking_dir)
        if as_json:
            print_json(fields(result, tracking_dir))
    raise typer.Exit(PASSED if result.passed else FAILED)


def require_writable(file: Path) -> None:
    """Raise before hours are spent where ``file`` cannot be written.

    Raises:
        ConfigError: it is a folder, or in none that can be written to.
    """
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{file}: cannot be written; give a file in a folder that is there")


def write_summaries(result: NightResult, summary: Path | None, junit: Path | None) -> None:
    """Add the Markdown of a night to ``summary``, as steps of a CI job do, and write its JUnit XML to ``junit``."""
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(summary_markdown(result.night, result.verdict))
    if junit is not None:
        write_whole(junit, junit_xml(result.night, result.verdict))


def show(console: Console, result: NightResult | Checked, tracking_dir: Path) -> None:
    """Print tables, what was not run, how long it took, the verdict with its reasons, and where to look."""
    if isinstance(result, NightResult):
        _show_night(console, result)
    elif isinstance(result.result, ComparisonResult):
        _show_comparison(console, result, result.result)
    elif isinstance(result.result, Tuning):
        _show_tuning(console, result, result.result)
    else:
        _show_audit(console, result, result.result)
    for name, where in where_to_look(result, tracking_dir).items():
        if where.startswith("http"):
            print_link(console, name, f"{name} in MLflow", where)
        else:
            print_line(console, f"{name:8}{where}")


def _show_night(console: Console, result: NightResult) -> None:
    """Print a table for each model and prompt set, with the columns that fit, and what was skipped."""
    night, verdict = result.night, result.verdict
    lines = rows(night, verdict)
    names = [name for name in columns(lines) if name != "on"]
    backend = shared_backend(outcome.cell.spec for outcome in night.outcomes)
    for on in dict.fromkeys(line.on for line in lines):
        title = f"{night.title}: {on}" + (f", backend {backend}" if backend else "")
        shown = _night_table(title, [line for line in lines if line.on == on], names)
        for spare in LESS_NEEDED:
            if fits(console, shown):
                break
            names = [name for name in names if name != spare]
            shown = _night_table(title, [line for line in lines if line.on == on], names)
        console.print()
        console.print(shown)
    for skipped in night.skipped:
        print_line(console, f"skipped {skipped.what}: {skipped.why}")
    spent = ", ".join(f"{part} {show_seconds(seconds)}" for part, seconds in night.seconds.items())
    reused = sum(outcome.reused for outcome in night.outcomes)
    found = f"{reused} of {len(night.outcomes)} cells were measured earlier" if reused else ""
    took = "; ".join(part for part in (f"took {spent}" if spent else "", found) if part)
    _show_verdict(console, result, took, verdict.reasons)
    for remark in verdict.comparison.remarks:
        print_line(console, f"  {remark}", "dim")


def _night_table(title: str, lines: Sequence[Row], names: Sequence[str]) -> Table:
    headings = {name: getattr(HEADINGS, name) for name in names}
    numbers = [text for name, text in headings.items() if name not in TEXTS]
    texts = [[getattr(line, name) for name in names] for line in lines]
    return table(title, list(headings.values()), texts, numbers, section=lambda row: row[0].partition(":")[0])


def _show_comparison(console: Console, checked: Checked, result: ComparisonResult) -> None:
    """Print parity and speed of each spec, and what was not run."""
    for spec in result.specs:
        tables = {"parity with the definition": parity_table(spec)}
        if spec.speed:
            tables[f"speed on {result.device}"] = speed_table(spec)
        if spec.model is not None:
            tables[f"{spec.model.model}, {spec.model.dtype}"] = model_table(spec)
        for title, (header, *lines) in tables.items():
            console.print()
            console.print(table(f"{spec.spec.text}: {title}", header, lines))
    for line in result.not_run:
        print_line(console, line, "yellow")
    if len(result.specs) > 1:
        specs = " ".join(shlex.quote(spec.spec.text) for spec in result.specs)
        print_line(console, f"backends were compared on each cache; to compare the caches: kivi evaluate MODEL PROMPTS {specs}")
    _show_verdict(console, checked, f"took {show_seconds(result.seconds)}", result.problems)


def _show_audit(console: Console, checked: Checked, report: AuditReport) -> None:
    """Print a row a check, and the errors and warnings with their commands, and what was found in numbers."""
    lines = [(check.name, check.question, check.outcome, show_seconds(check.seconds)) for check in report.checks]
    console.print()
    console.print(table(f"audit of {report.spec.text}", ("check", "question", "outcome", "took"), lines))
    for severity in ("warning", "error"):
        for name, found in report.findings(severity):
            print_line(console, f"{severity}: {name}, {found.name}: {found.evidence}", STYLES[severity])
            print_line(console, f"  again: {found.command}")
    for name, found in report.findings("info"):
        print_line(console, f"{name}, {found.name}: {found.evidence}")
    for check in report.checks:
        if check.not_run:
            print_line(console, f"{check.name}: {check.not_run}", "yellow")
    _show_verdict(console, checked, f"took {show_seconds(report.seconds)}")


def _show_tuning(console: Console, checked: Checked, result: Tuning) -> None:
    """Print the Pareto front and mlx-lm's caches, a sentence for each recommended cache, and where all of it is written."""
    lines = [line for line in tuning_rows(result) if line[-1] or line[1] == "mlx-lm"]
    shown = [index for index, name in enumerate(TUNING) if console.width >= TUNING_WIDTH or name not in TUNING_WIDE]
    title = f"caches for {result.model}, judged on {result.judged}"
    cells = [[line[index] for index in shown] for line in lines]
    console.print(table(title, [TUNING[index] for index in shown], cells, TUNING_NUMBERS))
    print_line(console, f"{len(lines)} of {len(result.candidates)} caches shown: the front, and mlx-lm's own", "dim")
    for slug, why in result.failed.items():
        print_line(console, f"not judged: {slug}: {why}", "yellow")
    _show_verdict(console, checked, f"took {show_seconds(result.seconds)}")
    for one in result.recommendations[1:]:
        print_line(console, f"  {one.sentence}")
    if checked.folder is not None:
        print_line(console, f"written {checked.folder / RECOMMENDED}")


def _show_verdict(console: Console, result: NightResult | Checked, took: str, reasons: Sequence[str] = ()) -> None:
    if took:
        print_line(console, took)
    print_line(console, result.headline, "bold green" if result.passed else "bold red")
    for reason in reasons:
        print_line(console, f"  {reason}")


def where_to_look(result: NightResult | Checked, tracking_dir: Path) -> dict[str, str]:
    """Return what opens MLflow, and pages of a result: of the team's server where there is one, else of ``kivi ui``."""
    logged, night = result.logged, isinstance(result, NightResult)
    server = redact(os.environ.get(TRACKING_URI, "")).rstrip("/")
    chosen = "" if tracking_dir == MLRUNS else f" --tracking-dir {shlex.quote(str(tracking_dir))}"
    address = server or UI_ADDRESS
    pages = {"report": str(result.page)} if isinstance(result, NightResult) else {}
    pages["MLflow"] = server or f"kivi ui{chosen}"
    pages["night" if night else "run"] = f"{address}/{run_path(logged.experiment_id, logged.run_id)}"
    if len(logged.child_ids) > 1:
        pages["compare"] = f"{address}/{compare_path(logged.experiment_id, logged.child_ids)}"
    return pages


def fields(result: NightResult | Checked, tracking_dir: Path) -> dict[str, Any]:
    """Return the result of a command for ``--json``."""
    if not isinstance(result, NightResult):
        return {"passed": result.passed, "logged": result.logged, "result": result.result, "folder": result.folder}
    night, verdict = result.night, result.verdict
    cells = [
        {
            "label": outcome.cell.label,
            "cell_key": outcome.cell.key,
            "spec": outcome.cell.spec.slug,
            "verdict": verdict.of(outcome.cell.key),
            "error": outcome.error,
            "reused": outcome.reused,
            "result": outcome.result,
        }
        for outcome in night.outcomes
    ]
    return {
        "night": night.title,
        "passed": verdict.passed,
        "reasons": verdict.reasons,
        "improvements": [change.sentence for change in verdict.comparison.improvements],
        "notes": verdict.comparison.notes,
        "cells": cells,
        "skipped": night.skipped,
        "seconds": night.seconds,
        "experiment": EXPERIMENT,
        "run_id": result.logged.run_id,
        "look": where_to_look(result, tracking_dir),
    }
