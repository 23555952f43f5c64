"""A tracking folder of version 0.1.0: a smoke night, an audit, a comparison and a pending night, all read as they were."""

from __future__ import annotations

import tarfile
from datetime import timedelta
from pathlib import Path

import pytest

from kivi.measure.audit import AuditReport
from kivi.measure.backends.comparison import ComparisonResult
from kivi.measure.results import CellResult
from tasks.config import NightlyConfig, Tolerances
from tasks.judge.gate import judge
from tasks.report.audit import audit_markdown
from tasks.report.comparison import comparison_markdown
from tasks.report.night import build_report
from tasks.run import audit, compare
from tasks.run.night import Night
from tasks.run.result_files import ResultStore, ThroughputResult
from tasks.tracking.baseline import against_history, marked_nights, read_result
from tasks.tracking.nights import find_cells, find_nights, log_night
from tasks.tracking.pending_nights import left_over
from tasks.tracking.runs import search
from tasks.tracking.store import writer

FOLDER = Path(__file__).parent / "data" / "kivi-folder.tar.xz"  # written by its commands
GOOD_NIGHT = "95ae723c5b2f4ff99b714513fa18d259"
NOTHING = Night(name="none", scheduled="", outcomes=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written-before")
    with tarfile.open(FOLDER) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture
def store(folder):
    with writer(folder) as store:
        yield store


def test_its_good_night_is_the_baseline_and_its_results_are_read(store):
    (night,) = find_nights(store)
    (marked,) = marked_nights(store)
    assert (night.info.run_id, marked.run_id, marked.cells) == (GOOD_NIGHT, GOOD_NIGHT, 2)
    found = {run.data.tags["kivi.cell_key"]: read_result(store, run) for run in find_cells(store, GOOD_NIGHT)}
    results = ResultStore(store.directory / "results")
    for key, logged in found.items():
        assert results.read(key, CellResult).quality == logged.quality
    (timed,) = (store.directory / "results").glob("throughput-*.json")
    assert len(results.read(timed.stem, ThroughputResult).arms) == 2


def test_a_pending_night_is_found_compared_with_the_good_one_and_logged(store):
    (pending,) = left_over(store.directory, other_than=NOTHING)
    later = [
        outcome.model_copy(update={"result": dated(outcome.result, timedelta(days=1))}) for outcome in pending.night.outcomes
    ]
    night = pending.night.model_copy(update={"outcomes": tuple(later)})
    comparison = against_history(store, night, Tolerances())
    counted = [change for change in comparison.changes if change.metric == "memory.bytes_per_token"]
    assert [(change.against, change.outcome) for change in counted] == [("the last good night 2026-12-01", "unchanged")] * 2
    verdict = judge(night, NightlyConfig(specs=("full",)), comparison)
    assert verdict.headline in build_report(night, verdict).markdown
    parent = log_night(store, pending.night)
    assert len(find_cells(store, parent)) == 2 and log_night(store, pending.night) == parent


@pytest.mark.parametrize(
    ("kind", "read", "module", "log", "show"),
    [
        ("audit", AuditReport, audit, audit.log_audit, audit_markdown),
        ("comparison", ComparisonResult, compare, compare.log_comparison, comparison_markdown),
    ],
)
def test_an_audit_and_a_comparison_are_shown_and_found_again(folder, kind, read, module, log, show):
    with writer(folder, module.EXPERIMENT) as store:
        (run,) = search(store, {"kivi.kind": kind})
        (file,) = folder.glob(f"artifacts/{run.info.run_id}/artifacts/{kind}.json")
        result = read.model_validate_json(file.read_bytes())
        assert log(store, result).run_id == run.info.run_id
        assert len(search(store, {"kivi.kind": kind})) == 1
    assert show(result).startswith("# ") and "passed" in show(result)


def dated(result, later):
    started = result.provenance.started + later
    return result.model_copy(update={"provenance": result.provenance.model_copy(update={"started": started})})
