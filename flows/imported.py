"""Log a result that was measured where no tracker is."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from flows.nightly import NightResult
from kivi.measure.results import CellResult
from tasks.config import ConfigError, NightlyConfig
from tasks.gate import judge
from tasks.night import Night, Outcome, PromptSource, cell_of
from tasks.places import REPORTS
from tasks.report import build_report
from tasks.track import find_cells, finish_night, log_night
from tasks.tracking_store import writer


def read_result(path: Path) -> CellResult:
    """Read one cell's result.

    Raises:
        ConfigError: the file cannot be read or is no result.
    """
    try:
        return CellResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: not a cell's result: {where}: {first['msg']}") from None


def log_result(result: CellResult, tracking_dir: Path) -> NightResult:
    """Log ``result`` as a night of one cell; logging it again finds its runs.

    Raises:
        TrackingError: the store cannot be used.
    """
    made = result.provenance
    source = PromptSource(name=made.prompt_set, sha256=made.prompt_sha256, source="measured elsewhere")
    night = Night(
        name="import",
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
