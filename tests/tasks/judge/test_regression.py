"""The laws of comparing two nights, on results made by hand; tests/tasks/judge/test_regression_recorded.py has real ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tasks.config import Tolerances
from tasks.judge.regression import Pair, compare
from tasks.judge.significance import sign_flip_p

GENERATOR = np.random.default_rng(7)
BLOCKS = GENERATOR.gamma(2.0, 0.1, size=16).tolist()  # mean KL of blocks differs by a factor of ten within a text
ROUNDS = [0.88, 0.91, 0.90, 0.92, 0.89]


def changed(result, *, kl=None, flips=None, bytes_more=0, tokens=None, rounds=None, device=None, drop_throughput=False):
    """Return ``result`` with other samples."""
    quality = result.quality.model_copy(
        update={"sequence_kl": kl if kl is not None else BLOCKS, "sequence_flips": flips if flips is not None else [0.1] * 16}
    )
    memory = result.memory.model_copy(
        update={
            "resident_bytes": result.memory.resident_bytes + bytes_more,
            "tokens": tokens or result.memory.tokens,
        }
    )
    throughput = result.throughput
    if throughput and rounds is not None:
        timings = [
            context.model_copy(update={"decode_ratio": context.decode_ratio.model_copy(update={"rounds": rounds})})
            for context in throughput.contexts
        ]
        throughput = throughput.model_copy(update={"contexts": timings})
    provenance = result.provenance.model_copy(update={"device": device or result.provenance.device})
    return result.model_copy(
        update={
            "quality": quality,
            "memory": memory,
            "throughput": None if drop_throughput else throughput,
            "provenance": provenance,
        }
    )


@pytest.fixture
def before(make_result):
    return changed(make_result(), rounds=ROUNDS)


def one(now, before, metric, **tolerances):
    comparison = compare([Pair("cell", "the last good night n1", now, before)], Tolerances(**tolerances))
    (change,) = [change for change in comparison.changes if change.metric == metric]
    return change


def test_a_night_equal_to_the_earlier_one_did_not_change(before):
    comparison = compare([Pair("cell", "n1", before, before)] * 20, Tolerances())
    assert {change.outcome for change in comparison.changes} == {"unchanged"}
    assert {change.metric for change in comparison.changes} == {
        "quality.kl_mean",
        "quality.flip_rate",
        "memory.bytes_per_token",
        "throughput.prefill_ratio@512",
        "throughput.decode_ratio@512",
    }


def test_a_rise_of_the_kl_is_a_regression_and_a_fall_an_improvement(before):
    worse = one(changed(before, kl=[1.2 * kl for kl in BLOCKS]), before, "quality.kl_mean")
    better = one(changed(before, kl=[0.8 * kl for kl in BLOCKS]), before, "quality.kl_mean")
    assert (worse.outcome, better.outcome) == ("regression", "improvement")
    assert worse.change == pytest.approx(0.2)
    assert 0 < worse.interval.low < 0.2 < worse.interval.high
    assert worse.adjusted_p <= 0.01
    assert worse.sentence.startswith("cell: quality.kl_mean rose by 20.0% (95 % interval ")
    assert "since the last good night n1; 10% is tolerated" in worse.sentence
    assert "fell by 20.0%" in better.sentence


def test_a_change_within_the_tolerance_is_none_however_certain(before):
    change = one(changed(before, kl=[1.09 * kl for kl in BLOCKS]), before, "quality.kl_mean")
    assert change.outcome == "unchanged"
    assert change.adjusted_p <= 0.01


def test_a_large_change_that_one_block_makes_is_chance(before):
    lone = [*BLOCKS[:-1], BLOCKS[-1] + 0.3 * sum(BLOCKS)]
    change = one(changed(before, kl=lone), before, "quality.kl_mean")
    assert change.change == pytest.approx(0.3)
    assert change.interval.low <= 0
    assert change.outcome == "unchanged"


def test_noise_of_floats_is_no_change(before):
    noise = changed(before, kl=[1e-8] * 16)
    assert one(changed(before, kl=[9e-7] * 16), noise, "quality.kl_mean").outcome == "unchanged"


@pytest.mark.parametrize("pairs", [8, 12, 16])
def test_without_a_change_one_comparison_in_a_hundred_is_below_one_percent(before, pairs):
    """Differences are as often up as down and have heavy tails. A bootstrap's p value fails here, with 5 % of 8 pairs."""
    generator = np.random.default_rng(11)
    earlier = changed(before, kl=[1.0] * pairs)
    draws = 1 + 0.1 * generator.standard_t(3, size=(400, pairs))
    comparison = compare([Pair("cell", "n1", changed(before, kl=draw), earlier) for draw in draws.tolist()], Tolerances())
    p_values = [change.p_value for change in comparison.changes if change.metric == "quality.kl_mean"]
    assert len(p_values) == 400
    assert sum(p <= 0.01 for p in p_values) <= stats.binom.ppf(0.99, 400, 0.01)


def test_eight_pairs_that_all_got_worse_are_a_regression_when_nothing_else_is_judged(before):
    """Eight are the fewest: all signs equal comes about by chance with 2 / 2^8."""
    eight = before.model_copy(update={"throughput": None})
    eight = changed(eight, kl=BLOCKS[:8], flips=[])
    worse = changed(eight, kl=[1.2 * kl for kl in BLOCKS[:8]], flips=[])
    change = one(worse, eight, "quality.kl_mean")
    assert (change.outcome, change.p_value) == ("regression", 2 / 2**8)


@pytest.mark.parametrize(("pairs", "tolerance"), [(8, 0.0), (14, 0.0), (15, 0.15), (30, 0.15)])
def test_the_sign_flip_test_is_scipys(pairs, tolerance):
    """All signs give the same p value exactly, drawn ones about."""
    differences = np.random.default_rng(pairs).normal(0.2, 1.0, size=pairs)
    scipys = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(1)
    )
    assert sign_flip_p(differences, 20_000, seed=2) == pytest.approx(scipys.pvalue, rel=tolerance, abs=1e-12)


@pytest.mark.parametrize(("more", "outcome"), [(1, "regression"), (0, "unchanged"), (-1, "improvement")])
def test_one_byte_in_the_whole_cache_counts(before, more, outcome):
    change = one(changed(before, bytes_more=more), before, "memory.bytes_per_token")
    assert (change.outcome, change.p_value, change.interval) == (outcome, None, None)


def test_one_byte_counts_also_where_a_quotient_of_floats_would_not_show_it(before):
    large = changed(before, bytes_more=10**17)
    change = one(changed(large, bytes_more=1), large, "memory.bytes_per_token")
    assert change.outcome == "regression"


def test_bytes_of_other_lengths_are_not_compared(before):
    change = one(changed(before, tokens=501), before, "memory.bytes_per_token")
    assert change.outcome == "not compared"
    assert "were 500 then and are 501 now" in change.sentence


def test_a_fall_of_the_speed_is_a_regression(before):
    slower = one(changed(before, rounds=[0.8 * ratio for ratio in ROUNDS]), before, "throughput.decode_ratio@512")
    assert (slower.outcome, slower.change) == ("regression", pytest.approx(-0.2))
    assert slower.interval.low < -0.2 < slower.interval.high < 0


def test_speeds_of_other_devices_are_not_compared(before):
    elsewhere = changed(before, rounds=[ratio / 2 for ratio in ROUNDS], device="gpu: Apple M4 Max")
    change = one(elsewhere, before, "throughput.decode_ratio@512")
    assert change.outcome == "not compared"
    assert "x86-64 processor, 2 cores then and on gpu: Apple M4 Max now" in change.sentence
    assert one(elsewhere, before, "memory.bytes_per_token").outcome == "unchanged"


def test_a_speed_that_is_missing_is_a_regression(before):
    change = one(changed(before, drop_throughput=True), before, "throughput.decode_ratio@512")
    assert change.outcome == "regression"
    assert "is missing, and was 0.9 on the last good night n1" in change.sentence


def test_samples_that_do_not_pair_or_are_few_are_not_compared(before):
    shorter = changed(before, kl=BLOCKS[:15])
    assert "16 samples then and 15 now do not pair up" in one(shorter, before, "quality.kl_mean").sentence
    few = changed(before, kl=BLOCKS[:7])
    assert "score more positions" in one(changed(before, kl=[2 * kl for kl in BLOCKS[:7]]), few, "quality.kl_mean").sentence


def test_the_speed_of_the_full_cache_is_not_compared_with_itself(make_result):
    full = changed(make_result("full"))
    metrics = {change.metric for change in compare([Pair("full", "n1", full, full)], Tolerances()).changes}
    assert not {metric for metric in metrics if metric.startswith("throughput.")}


def test_the_same_seed_gives_the_same_comparison(before):
    pairs = [Pair("cell", "n1", changed(before, kl=GENERATOR.permutation(BLOCKS).tolist()), before)]
    assert compare(pairs, Tolerances(seed=3)) == compare(pairs, Tolerances(seed=3))
    first, second = (compare(pairs, Tolerances(seed=seed)).changes[0].interval for seed in (3, 4))
    assert first.low != second.low
    assert "seed 3" in first.method


def test_false_discoveries_are_controlled_over_the_night(before):
    """A p value that convinces alone does not when it is the least of several hundred."""
    slower = changed(before, rounds=[0.80, 0.73, 0.77, 0.82, 0.75])
    alone = compare([Pair("cell", "n1", slower, before)], Tolerances())
    among = compare([Pair("cell", "n1", slower, before), *[Pair("other", "n1", before, before)] * 50], Tolerances())
    (change,) = alone.regressions
    assert change.metric == "throughput.decode_ratio@512"
    assert 0.01 / 200 < change.p_value < change.adjusted_p <= 0.01
    assert not among.regressions


def test_a_lone_regression_is_found_among_many_cells(before):
    """The signs that are drawn grow with the comparisons, so that their smallest p passes Benjamini-Hochberg."""
    blocks = 2 * BLOCKS
    before, worse = changed(before, kl=blocks), changed(before, kl=[1.2 * kl for kl in blocks])
    comparison = compare([Pair("bad", "n1", worse, before), *[Pair("good", "n1", before, before)] * 100], Tolerances())
    assert [(change.cell, change.metric) for change in comparison.regressions] == [("bad", "quality.kl_mean")]
