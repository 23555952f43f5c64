"""Which night a night is compared with, in a real MLflow store."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from mlflow.exceptions import MlflowException

from tasks.config import NightlyConfig, Tolerances
from tasks.judge.gate import judge
from tasks.tracking.baseline import (
    CANDIDATES,
    BaselineError,
    against_history,
    identity,
    mark_good,
    marked_nights,
    pin_baseline,
    read_result,
    serving_cells,
    set_baseline,
    unpin,
)
from tasks.tracking.nights import PIN, finish_night, log_night
from tasks.tracking.store import database_uri

CONFIG = NightlyConfig(specs=("full",))
BLOCKS = [0.002 + 0.0001 * block for block in range(16)]
FIRST = datetime(2026, 11, 1, 2, 0, tzinfo=UTC)


@pytest.fixture
def night_of(make_result, make_night):
    """Build the night of a day of November, its KL by block all multiplied by ``worse``."""

    def build(day, worse=1.0, spec="kivi-roundtrip:bits=4,backend=mlx", device="", bytes_more=0, **fields):
        result = make_result(spec, key=f"{day:032x}", kl_mean=0.0027 * worse, **fields)
        quality = result.quality.model_copy(
            update={"sequence_kl": [kl * worse for kl in BLOCKS], "sequence_flips": [0.02 * worse] * 16}
        )
        made = result.provenance.model_copy(
            update={"started": FIRST + timedelta(days=day), "device": device or result.provenance.device}
        )
        memory = result.memory.model_copy(update={"resident_bytes": result.memory.resident_bytes + bytes_more})
        result = result.model_copy(update={"quality": quality, "provenance": made, "memory": memory})
        return make_night(result, scheduled=f"2026-11-{day:02}")

    return build


def log(store, night, good=True):
    parent = log_night(store, night)
    finish_night(store, parent, night, judge(night, CONFIG), "", {})
    if good:
        mark_good(store, parent)
    return parent


def against(store, night):
    comparison = against_history(store, night, Tolerances())
    return sorted({change.against for change in comparison.changes}), comparison


def test_a_first_night_has_no_baseline_and_says_so(store, night_of):
    names, comparison = against(store, night_of(1))
    assert names == []
    assert comparison.notes == ("no baseline yet for any cell: thresholds alone judge",)


def test_a_night_is_compared_with_the_last_good_one(store, night_of):
    log(store, night_of(1))
    log(store, night_of(2))
    log(store, night_of(3, worse=2), good=False)
    names, comparison = against(store, night_of(4, worse=1.3))
    assert names == ["the last good night 2026-11-02"]
    regressions = {change.metric: change for change in comparison.regressions}
    assert regressions.keys() == {"quality.kl_mean", "quality.flip_rate"}
    assert regressions["quality.kl_mean"].change == pytest.approx(0.3)
    assert comparison.notes == ()


def test_the_baseline_is_read_back_whole_from_the_store(store, night_of):
    log(store, night_of(1))
    _, comparison = against(store, night_of(2, bytes_more=1))
    (change,) = comparison.regressions
    assert change.metric == "memory.bytes_per_token"
    assert (change.before, change.after) == (300_000 / 500, 300_001 / 500)


@pytest.mark.parametrize(
    "other",
    [{"device": "gpu: Apple M4 Max"}, {"spec": "kivi-roundtrip:bits=2,backend=mlx"}],
    ids=["device", "spec"],
)
def test_another_identity_is_no_baseline(store, night_of, other):
    log(store, night_of(1, **other))
    names, comparison = against(store, night_of(2))
    assert names == []
    assert len(comparison.notes) == 1


def test_identity_is_what_must_be_equal_to_compare(make_result):
    result = make_result()

    def other(**changes):
        return identity(result.model_copy(update={"provenance": result.provenance.model_copy(update=changes)}))

    settings = result.provenance.settings
    assert identity(make_result(git_sha="another", model="same weights elsewhere")) == identity(result)
    assert other(packages={"mlx": "9"}, settings=settings.model_copy(update={"seed": 9, "deadline_s": 9.0})) == identity(result)
    different = [
        other(weights_digest="other"),
        other(model_dtype="float16"),
        other(prompt_sha256="cd" * 32),
        other(device="gpu: Apple M4 Max"),
        other(blas="reference"),
        other(settings=settings.model_copy(update={"score": settings.score.model_copy(update={"length": 64})})),
        identity(make_result("full")),
    ]
    assert len({identity(result), *different}) == 1 + len(different)


def test_a_night_is_never_its_own_baseline_and_resuming_it_compares_as_before(store, night_of):
    log(store, night_of(1))
    night = night_of(2, worse=1.05)
    parent = log(store, night)
    log(store, night_of(3))
    assert against(store, night)[0] == ["the last good night 2026-11-01"]
    before = store.client.get_run(parent).data.tags["kivi.baseline"]
    mark_good(store, parent)
    assert store.client.get_run(parent).data.tags["kivi.baseline"] == before


def test_a_baseline_set_by_hand_takes_effect_until_the_next_good_night(store, night_of):
    log(store, night_of(1))
    log(store, night_of(2, worse=1.3), good=False)
    assert against(store, night_of(3, worse=1.3))[1].regressions
    marked = set_baseline(store, "2026-11-02")
    assert (marked.cells, marked.left_out) == (1, ())
    names, comparison = against(store, night_of(3, worse=1.3))
    assert (names, comparison.regressions) == (["the last good night 2026-11-02"], ())
    log(store, night_of(3, worse=1.3))
    assert against(store, night_of(4, worse=1.3))[0] == ["the last good night 2026-11-03"]


@pytest.mark.parametrize("chosen", [set_baseline, pin_baseline])
def test_a_night_that_was_chosen_by_hand_is_not_compared_with_itself(store, night_of, chosen):
    log(store, night_of(1))
    chosen(store, "2026-11-01")
    worse = night_of(2, worse=1.3)
    log(store, worse, good=False)
    before = against(store, worse)
    chosen(store, "2026-11-02")
    assert against(store, worse) == before
    assert {change.against[-10:] for change in before[1].regressions} == {"2026-11-01"}


def test_a_pin_stays_and_catches_what_creeps(store, night_of):
    log(store, night_of(1))
    pin_baseline(store, "2026-11-01")
    for day, worse in ((2, 1.08), (3, 1.16), (4, 1.24)):
        night = night_of(day, worse=worse)
        _, comparison = against(store, night)
        assert not [change for change in comparison.regressions if "last good" in change.against]
        log(store, night)
    caught = [change for change in comparison.regressions if change.metric == "quality.kl_mean"]
    assert [change.against for change in caught] == ["the pinned night 2026-11-01"]


def test_another_pin_takes_the_place_of_the_first_and_unpin_removes_all(store, night_of):
    log(store, night_of(1))
    log(store, night_of(2))
    pin_baseline(store, "2026-11-01")
    pin_baseline(store, "last")
    assert "the pinned night 2026-11-02" in against(store, night_of(3))[0]
    assert unpin(store) == 2
    assert against(store, night_of(3))[0] == ["the last good night 2026-11-02"]


def test_the_last_night_is_no_evaluation(store, night_of):
    """What was evaluated or imported by hand since then is not what `last` means, but can be named."""
    log(store, night_of(1))
    for day, name in ((2, "evaluate"), (3, "import")):
        log(store, night_of(day).model_copy(update={"name": name}), good=False)
    assert pin_baseline(store, "last").night == "nightly 2026-11-01"
    assert pin_baseline(store, "2026-11-03").night == "import 2026-11-03"


def test_the_marks_are_shown_with_what_they_serve(store, night_of):
    log(store, night_of(1))
    log(store, night_of(2))
    log(store, night_of(3, spec="full"))
    pin_baseline(store, "2026-11-01")
    shown = {(marked.night, marked.mark.split()[0]): marked.cells for marked in marked_nights(store)}
    assert shown == {
        ("nightly 2026-11-02", "kivi.baseline"): 1,
        ("nightly 2026-11-03", "kivi.baseline"): 1,
        ("nightly 2026-11-01", "kivi.pin"): 1,
    }


def test_improvements_are_named(store, night_of):
    log(store, night_of(1))
    _, comparison = against(store, night_of(2, worse=0.7))
    assert {change.metric for change in comparison.improvements} == {"quality.kl_mean", "quality.flip_rate"}
    assert comparison.regressions == ()


def test_a_result_that_cannot_be_read_is_passed_over_with_a_note(store, night_of):
    log(store, night_of(1))
    parent = log(store, night_of(2))
    (cell,) = store.client.search_runs([store.experiment_id], f"tags.mlflow.parentRunId = '{parent}'")
    store.client.log_text(cell.info.run_id, '{"schema_version": 1', "result.json")
    names, comparison = against(store, night_of(3))
    assert names == ["the last good night 2026-11-01"]
    assert len(comparison.notes) == 1
    assert comparison.notes[0].startswith("the last good night 2026-11-02 is passed over: result.json of run ")


def test_a_result_that_was_edited_is_passed_over_with_a_note(store, night_of):
    log(store, night_of(1))
    parent = log(store, night_of(2))
    (cell,) = store.client.search_runs([store.experiment_id], f"tags.mlflow.parentRunId = '{parent}'")
    better = read_result(store, cell)
    better = better.model_copy(update={"quality": better.quality.model_copy(update={"kl_mean": better.quality.kl_mean * 2})})
    store.client.log_text(cell.info.run_id, better.model_dump_json(indent=2), "result.json")
    names, comparison = against(store, night_of(3))
    assert names == ["the last good night 2026-11-01"]
    (note,) = comparison.notes
    assert note.startswith("the last good night 2026-11-02 is passed over: result.json of run ")
    assert note.endswith(" is not as it was logged: the run's tag kivi.result is the digest of another")


@pytest.mark.parametrize("for_good", [False, True], ids=["deleted", "collected"])
def test_a_night_that_was_deleted_in_mlflow_is_no_baseline(store, night_of, for_good):
    """MLflow deletes the parent alone: its cells stay, with their marks."""
    log(store, night_of(1))
    pin_baseline(store, "2026-11-01")
    parents = [log(store, night_of(day)) for day in range(2, 3 + CANDIDATES)]
    for parent in parents:
        pin_baseline(store, parent)
        store.client.delete_run(parent)
    if for_good:
        address = database_uri(store.directory)
        command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", address, "--tracking-uri", address]
        subprocess.run([*command, "--run-ids", ",".join(parents)], capture_output=True, check=True)
        with pytest.raises(MlflowException, match="not found"):
            store.client.get_run(parents[0])
    names, comparison = against(store, night_of(10))
    assert (names, comparison.notes) == (["the last good night 2026-11-01", "the pinned night 2026-11-01"], ())
    assert {(marked.night, marked.cells) for marked in marked_nights(store)} == {("nightly 2026-11-01", 1)}
    assert len(serving_cells(store, PIN)) == 1


def test_what_is_no_baseline_is_refused_in_one_sentence(store, night_of, make_night):
    log(store, night_of(1))
    with pytest.raises(BaselineError, match=r"'yesterday': no such night; the newest are nightly 2026-11-01: give a run id"):
        set_baseline(store, "yesterday")
    failed = make_night("no memory", scheduled="2026-11-02")
    log(store, failed, good=False)
    with pytest.raises(BaselineError, match=r"nightly 2026-11-02 has no cell that could be a baseline: .*it is FAILED"):
        set_baseline(store, "2026-11-02")
    lying = night_of(3, audit_passed=False)
    log(store, lying, good=False)
    with pytest.raises(BaselineError, match=r"its cache failed the audit"):
        pin_baseline(store, "2026-11-03")
    unfinished = night_of(4)
    log_night(store, unfinished)
    with pytest.raises(BaselineError, match=r"nightly 2026-11-04 is RUNNING, not finished"):
        set_baseline(store, "last")


def test_a_regression_fails_the_night_and_an_improvement_is_remarked(store, night_of):
    log(store, night_of(1))
    worse, better = night_of(2, worse=1.3, bytes_more=1), night_of(2, worse=0.7)
    failed = judge(worse, CONFIG, against(store, worse)[1])
    passed = judge(better, CONFIG, against(store, better)[1])
    assert (failed.passed, passed.passed) == (False, True)
    assert judge(worse, CONFIG).passed  # thresholds alone let it pass
    assert len(failed.reasons) == 3
    assert any(
        "memory.bytes_per_token rose from 600 to 600.002 bytes since the last good night" in one for one in failed.reasons
    )
    assert failed.of(worse.outcomes[0].cell.key) == "fail"
    assert sum("fell by" in remark for remark in passed.comparison.remarks) == 2
