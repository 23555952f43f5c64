"""What the end of a night does to the marks by which later nights find it, in a real MLflow store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flows.log_and_judge import log_and_judge
from tasks.config import NightlyConfig, Thresholds
from tasks.tracking.baseline import marked_nights, pin_baseline, set_baseline
from tasks.tracking.nights import find_cells, find_nights
from tasks.tracking.store import writer

SPECS = ("kivi-roundtrip:bits=4,backend=mlx", "kivi-roundtrip:bits=2,backend=mlx")
CONFIG = NightlyConfig(specs=SPECS)
STRICT = CONFIG.model_copy(update={"thresholds": {"kivi*": Thresholds(compression=100.0)}})
FIRST = datetime(2026, 11, 1, 2, 0, tzinfo=UTC)


@pytest.fixture
def night_of(prefect_server, make_result, make_night):
    """Build the night of two caches of a day of November, measured ``later`` than its own results."""

    def build(day, later=timedelta(), specs=SPECS):
        started = FIRST + timedelta(days=day) + later
        results = [make_result(spec, key=f"{10 * day + place:032x}") for place, spec in enumerate(specs)]
        results = [
            result.model_copy(update={"provenance": result.provenance.model_copy(update={"started": started})})
            for result in results
        ]
        return make_night(*results, scheduled=f"2026-11-{day:02}")

    return build


def marks(folder):
    """Return what each marked night serves as, and for how many cells."""
    with writer(folder) as store:
        return {(one.night[-2:], " ".join(one.mark.split()[:-1])): one.cells for one in marked_nights(store)}


def test_a_night_that_fails_when_it_is_judged_again_is_no_longer_the_last_good_one(night_of, tmp_path):
    log_and_judge(night_of(1), CONFIG, tmp_path, False)
    night = night_of(2)
    assert log_and_judge(night, CONFIG, tmp_path, False).verdict.passed
    assert marks(tmp_path) == {("02", "kivi.baseline good"): 2}
    again = log_and_judge(night, STRICT, tmp_path, False)
    assert not again.verdict.passed
    assert marks(tmp_path) == {("01", "kivi.baseline good"): 2}
    with writer(tmp_path) as store:
        assert all(
            "kivi.baseline" not in store.client.get_run(run).data.tags for run in (again.logged.run_id, *again.logged.child_ids)
        )
    log_and_judge(night, CONFIG, tmp_path, False)
    assert marks(tmp_path) == {("02", "kivi.baseline good"): 2}


def test_a_night_that_a_person_chose_stays_the_baseline_when_it_fails(night_of, tmp_path):
    night = night_of(1)
    log_and_judge(night, CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        set_baseline(store, find_nights(store)[0].info.run_id)
    assert not log_and_judge(night, STRICT, tmp_path, False).verdict.passed
    assert marks(tmp_path) == {("01", "kivi.baseline set"): 2}


def test_a_night_that_is_measured_anew_keeps_its_pin_and_the_mark_that_a_person_set(night_of, tmp_path):
    for day in (1, 2, 3):
        log_and_judge(night_of(day), CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        pin_baseline(store, "2026-11-01")
        pin_baseline(store, "2026-11-02")
        set_baseline(store, "2026-11-02")
    chosen = {("02", "kivi.pin"): 2, ("02", "kivi.baseline set"): 2}
    assert marks(tmp_path) == chosen
    before = runs_of(tmp_path, "2026-11-02")
    anew = log_and_judge(night_of(2, later=timedelta(hours=1)), CONFIG, tmp_path, True)
    assert marks(tmp_path) == chosen
    after = runs_of(tmp_path, "2026-11-02")
    assert len(after) == 3 and not set(after) & set(before) and set(after) == {anew.logged.run_id, *anew.logged.child_ids}
    assert set(after.values()) == set(before.values()), "marked at the same time, so what is marked later still follows"
    next_night = log_and_judge(night_of(4), CONFIG, tmp_path, False)
    assert {change.against for change in next_night.verdict.comparison.changes} == {
        "the last good night 2026-11-02",
        "the pinned night 2026-11-02",
    }


def test_a_pinned_night_that_fails_when_it_is_measured_anew_stays_pinned_and_says_which_cell_is_not(night_of, tmp_path):
    log_and_judge(night_of(1), CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        pin_baseline(store, "2026-11-01")
    lost = night_of(1, later=timedelta(hours=1))
    for error in ("no memory", ""):
        first, *others = lost.outcomes
        result = None if error else first.result
        night = lost.model_copy(update={"outcomes": (first.model_copy(update={"result": result, "error": error}), *others)})
        log_and_judge(night, CONFIG, tmp_path, bool(error))
        assert marks(tmp_path).get(("01", "kivi.pin")) == (1 if error else 2)


def test_a_cell_that_is_measured_anew_within_a_pinned_night_is_pinned(night_of, tmp_path):
    log_and_judge(night_of(1), CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        pin_baseline(store, "2026-11-01")
    log_and_judge(night_of(1, later=timedelta(hours=1)), STRICT, tmp_path, False)
    assert marks(tmp_path) == {("01", "kivi.pin"): 2}


def test_a_pinned_night_of_which_no_cell_is_left_says_so(night_of, tmp_path, caplog):
    log_and_judge(night_of(1), CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        pin_baseline(store, "2026-11-01")
    night = night_of(1)
    outcomes = tuple(one.model_copy(update={"result": None, "error": "no memory"}) for one in night.outcomes)
    log_and_judge(night.model_copy(update={"outcomes": outcomes}), CONFIG, tmp_path, True)
    (warning,) = [record.message for record in caplog.records if "kivi.pin" in record.message]
    assert warning.startswith("kivi.pin: nightly 2026-11-01 has no cell that could be a baseline: ")


def runs_of(folder, scheduled):
    """Return the marks of a night's runs, that of the night among them."""
    with writer(folder) as store:
        (night,) = [run for run in find_nights(store) if run.data.tags["kivi.night"] == scheduled]
        runs = [night, *find_cells(store, night.info.run_id)]
    return {run.info.run_id: (run.data.tags.get("kivi.pin"), run.data.tags.get("kivi.baseline")) for run in runs}
