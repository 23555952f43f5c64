"""What the end of a night does to the marks by which later nights find it, in a real MLflow store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from flows.conclude import conclude
from tasks.baseline import marked_nights, set_baseline
from tasks.config import NightlyConfig, Thresholds
from tasks.track import find_nights
from tasks.tracking_store import writer

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
    conclude(night_of(1), CONFIG, tmp_path, False)
    night = night_of(2)
    assert conclude(night, CONFIG, tmp_path, False).verdict.passed
    assert marks(tmp_path) == {("02", "kivi.baseline good"): 2}
    again = conclude(night, STRICT, tmp_path, False)
    assert not again.verdict.passed
    assert marks(tmp_path) == {("01", "kivi.baseline good"): 2}
    with writer(tmp_path) as store:
        assert all("kivi.baseline" not in store.client.get_run(run).data.tags for run in (again.run_id, *again.cell_ids))
    conclude(night, CONFIG, tmp_path, False)
    assert marks(tmp_path) == {("02", "kivi.baseline good"): 2}


def test_a_night_that_a_person_chose_stays_the_baseline_when_it_fails(night_of, tmp_path):
    night = night_of(1)
    conclude(night, CONFIG, tmp_path, False)
    with writer(tmp_path) as store:
        set_baseline(store, find_nights(store)[0].info.run_id)
    assert not conclude(night, STRICT, tmp_path, False).verdict.passed
    assert marks(tmp_path) == {("01", "kivi.baseline set"): 2}
