"""Log a result that was measured where no tracker is."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from flows.audit import Audited
from flows.compare import Compared
from flows.nightly import NightResult
from kivi.measure.comparison import ComparisonResult
from kivi.measure.results import CellResult
from kivi.measure.scenes import AuditReport
from tasks import audit, compare
from tasks.config import ConfigError, NightlyConfig
from tasks.gate import judge
from tasks.night import IMPORT, Night, Outcome, PromptSource, cell_of
from tasks.places import REPORTS
from tasks.report import build_report
from tasks.track import find_cells, finish_night, log_night
from tasks.tracking_store import writer

KINDS: dict[str, type[ComparisonResult] | type[AuditReport]] = {"kivi-comparison": ComparisonResult, "kivi-audit": AuditReport}
NAMES = {CellResult: "a cell's result", ComparisonResult: "a comparison", AuditReport: "an audit"}


def read_result(path: Path) -> CellResult | ComparisonResult | AuditReport:
    """Read one cell's result, a comparison of backends, or an audit, whichever the file says it is.

    Raises:
        ConfigError: the file cannot be read or is none of them.
    """
    try:
        content = path.read_bytes()
        kind = KINDS.get(_kind(content), CellResult)
        return kind.model_validate_json(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: not {NAMES[kind]}: {where}: {first['msg']}") from None


def _kind(content: bytes) -> str:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):  # pydantic then says what is wrong
        return ""
    return str(fields.get("kind", "")) if isinstance(fields, dict) else ""


def log_check(result: ComparisonResult | AuditReport, tracking_dir: Path) -> Compared | Audited:
    """Log a comparison or an audit; logging it again finds its runs.

    Raises:
        TrackingError: the store cannot be used.
    """
    if isinstance(result, ComparisonResult):
        with writer(tracking_dir, compare.EXPERIMENT) as store:
            return Compared(result=result, logged=compare.log_comparison(store, result))
    with writer(tracking_dir, audit.EXPERIMENT) as store:
        return Audited(report=result, logged=audit.log_audit(store, result))


def log_result(result: CellResult, tracking_dir: Path) -> NightResult:
    """Log ``result`` as a night of one cell; logging it again finds its runs.

    Raises:
        TrackingError: the store cannot be used.
    """
    made = result.provenance
    source = PromptSource(name=made.prompt_set, sha256=made.prompt_sha256, source="measured elsewhere")
    night = Night(
        name=IMPORT,
        scheduled=made.started.strftime("%Y-%m-%d %H:%M UTC"),
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
    return NightResult(
        night=night, verdict=verdict, page=page, experiment_id=store.experiment_id, run_id=run_id, cell_ids=cell_ids
    )
