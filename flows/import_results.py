"""Log a result that was measured where no tracker is."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from flows.results import Checked, NightResult
from kivi.measure.audit import AuditReport
from kivi.measure.backends.comparison import ComparisonResult
from kivi.measure.results import CellResult
from tasks.config import ConfigError, NightlyConfig, first_sentence
from tasks.judge.gate import judge
from tasks.paths import REPORTS
from tasks.report.night import build_report
from tasks.run import audit, compare
from tasks.run.night import IMPORT, Night, Outcome, PromptSource, cell_of
from tasks.run.result_files import checked
from tasks.tracking.nights import find_cells, finish_night, log_night
from tasks.tracking.runs import Logged
from tasks.tracking.store import writer

Measured = CellResult | ComparisonResult | AuditReport

KINDS: dict[str, type[Measured]] = {"kivi-comparison": ComparisonResult, "kivi-audit": AuditReport}
NAMES = {CellResult: "a cell's result", ComparisonResult: "a comparison", AuditReport: "an audit"}
KEY = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")  # a night's cells have the short one, `python -m kivi.measure` the long one
FIRST = datetime(2024, 1, 1, tzinfo=UTC)  # nothing was measured before there was KIVI
CLOCKS_DIFFER = timedelta(days=1)


def read_result(path: Path) -> Measured:
    """Read one cell's result, a comparison of backends, or an audit, whichever the file says it is.

    Raises:
        ConfigError: the file cannot be read, is none of them, or has a figure, key or date that no measurement gives.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    kind = KINDS.get(_kind(content), CellResult)
    try:
        result = kind.model_validate_json(checked(content))
        _check_origin(result)
    except ValueError as error:
        why = first_sentence(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path}: not {NAMES[kind]}: {why}") from None
    return result


def _check_origin(result: Measured) -> None:
    """Refuse what a file says of its own origin and cannot be true: it would stand among the nights for good.

    Raises:
        ValueError: the key is no content hash, or the measurement began before KIVI or in the future.
    """
    started = result.provenance.started if isinstance(result, CellResult) else result.started
    if isinstance(result, CellResult) and not KEY.fullmatch(result.cell_key):
        raise ValueError(f"cell_key: {result.cell_key!r:.80}: expected 32 or 64 hexadecimal digits, as they were measured")
    if not FIRST <= started <= datetime.now(UTC) + CLOCKS_DIFFER:
        raise ValueError(
            f"started: {started.isoformat()}: expected a time from {FIRST.year} on that is not in the future; "
            "set the clock of the machine that measured, and measure again"
        )


def _kind(content: bytes) -> str:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):  # pydantic then says what is wrong
        return ""
    return str(fields.get("kind", "")) if isinstance(fields, dict) else ""


def log_result(result: Measured, tracking_dir: Path) -> NightResult | Checked:
    """Log a comparison, an audit, or a cell's result as a night of one cell; logging it again finds its runs.

    Raises:
        TrackingError: the store cannot be used.
    """
    if isinstance(result, CellResult):
        return _log_night(result, tracking_dir)
    if isinstance(result, ComparisonResult):
        with writer(tracking_dir, compare.EXPERIMENT) as store:
            return Checked(result=result, logged=compare.log_comparison(store, result))
    with writer(tracking_dir, audit.EXPERIMENT) as store:
        return Checked(result=result, logged=audit.log_audit(store, result))


def _log_night(result: CellResult, tracking_dir: Path) -> NightResult:
    made = result.provenance
    source = PromptSource(name=made.prompt_set, sha256=made.prompt_sha256, source="measured elsewhere")
    night = Night(
        name=IMPORT,
        scheduled=made.started.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        outcomes=(Outcome(cell=cell_of(result), result=result, reused=True),),
        prompt_sets=(source,),
    )
    verdict = judge(night, NightlyConfig(specs=(made.spec,)))
    with writer(tracking_dir) as store:
        run_id = log_night(store, night)
        cell_ids = tuple(run.info.run_id for run in find_cells(store, run_id))
        report = build_report(night, verdict, store.experiment_id, run_id, cell_ids)
        page = report.write(tracking_dir / REPORTS)
        finish_night(store, run_id, night, verdict, report.note, {"report.html": report.html, **report.figures})
    logged = Logged(experiment_id=store.experiment_id, run_id=run_id, child_ids=cell_ids)
    return NightResult(night=night, verdict=verdict, page=page, logged=logged)
