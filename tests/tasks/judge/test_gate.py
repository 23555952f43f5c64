"""The gate: a pass needs every cell, every audit and every limit; each failure is one sentence."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kivi.measure.results import Finding
from tasks.config import NightlyConfig, Thresholds
from tasks.judge.gate import METRICS, judge


@pytest.fixture
def config():
    return NightlyConfig(specs=("full", "kivi-roundtrip:bits=4,backend=mlx"))


def test_results_within_their_limits_pass(make_result, make_night, config):
    verdict = judge(make_night(make_result("full"), make_result()), config)
    assert verdict.passed
    assert verdict.reasons == ()
    assert {check.metric for check in verdict.checks} >= {"audit.passed", "quality.kl_mean", "quality.flip_rate"}


def test_a_value_beyond_its_limit_fails_in_one_sentence(make_result, make_night, config):
    verdict = judge(make_night(make_result(kl_mean=0.62)), config)
    assert not verdict.passed
    assert verdict.reasons == (
        "kivi-roundtrip-k4v4-g32-r128-mlx on embedded × humaneval: quality.kl_mean is 0.62 nats, above the limit of 0.01 nats",
    )


def test_the_limit_itself_passes(make_result, make_night, config):
    assert judge(make_night(make_result(kl_mean=0.01)), config).passed


def test_a_value_just_beyond_its_limit_fails(make_result, make_night, config):
    assert not judge(make_night(make_result(kl_mean=0.0101)), config).passed


def test_higher_is_better_fails_below_its_limit(make_result, make_night):
    config = NightlyConfig(specs=("full",), thresholds={"kivi*": Thresholds(compression=5.0)})
    verdict = judge(make_night(make_result()), config)
    assert [reason.split(": ")[1] for reason in verdict.reasons] == ["memory.compression is 3.33333, below the limit of 5"]


def test_a_pass_without_a_limit_of_quality_says_so(make_result, make_night):
    config = NightlyConfig(specs=("full",), thresholds={"*": Thresholds(compression=1.0)})
    spec = "kivi:key_bits=8,value_bits=2,backend=mlx"
    verdict = judge(make_night(make_result(spec), make_result()), config)
    assert verdict.passed
    assert verdict.comparison.notes == (
        "kivi-k8v2-g32-r128-mlx on embedded × humaneval has no limit of quality, so any passes: set one under thresholds",
    )


def test_a_pass_says_what_the_audit_warns_of(make_result, make_night, config):
    result = make_result()
    audit = result.audit.model_copy(update={"findings": [Finding(name="x", severity="warning", evidence="nothing was seen")]})
    verdict = judge(make_night(result.model_copy(update={"audit": audit})), config)
    assert verdict.passed
    assert verdict.comparison.notes == ("kivi-roundtrip-k4v4-g32-r128-mlx on embedded × humaneval: nothing was seen",)


def test_a_failed_cell_is_never_a_pass(make_result, make_night, config):
    verdict = judge(make_night(make_result(), "the kernel did not compile"), config)
    assert not verdict.passed
    assert "failed: the kernel did not compile" in verdict.reasons[0]


def test_a_cell_with_figures_and_an_error_is_never_a_pass(make_result, make_night, config):
    night = make_night(make_result())
    night = night.model_copy(update={"outcomes": (night.outcomes[0].model_copy(update={"error": "not timed"}),)})
    assert judge(night, config).reasons == ("kivi-roundtrip-k4v4-g32-r128-mlx on embedded × humaneval failed: not timed",)


def test_a_missing_result_is_never_a_pass(make_result, make_night, config):
    night = make_night(make_result())
    night = night.model_copy(update={"outcomes": (night.outcomes[0].model_copy(update={"result": None}),)})
    assert judge(night, config).reasons[0].endswith("has no result")


def test_a_night_without_cells_is_never_a_pass(make_night, config):
    verdict = judge(make_night(), config)
    assert not verdict.passed
    assert verdict.headline == "failed: nothing was measured"


def test_a_failed_audit_fails_with_its_evidence(make_result, make_night, config):
    verdict = judge(make_night(make_result(audit_passed=False)), config)
    assert verdict.reasons[0].endswith("failed its audit: layer 3 holds 10 bytes more than it bills")


def test_a_limit_on_what_was_not_measured_is_never_a_pass(make_result, make_night):
    config = NightlyConfig(specs=("full",), thresholds={"kivi*": Thresholds(decode_ratio=0.5)})
    verdict = judge(make_night(make_result(throughput=False)), config)
    assert "throughput.decode_ratio was not measured, and has a limit of 0.5" in verdict.reasons[0]


def test_wrong_answers_fail_where_a_limit_says_so(make_result, make_night):
    config = NightlyConfig(specs=("full",), thresholds={"kivi*": Thresholds(accuracy=0.9)})
    assert judge(make_night(make_result(accuracy=0.95)), config).passed
    (wrong,) = judge(make_night(make_result(accuracy=0.5)), config).reasons
    assert wrong.endswith("answers.accuracy is 0.5, below the limit of 0.9")
    (missing,) = judge(make_night(make_result()), config).reasons
    assert missing.endswith("answers.accuracy was not measured, and has a limit of 0.9")


def test_the_verdict_of_a_cell_is_its_own(make_result, make_night, config):
    good, bad = make_result(), make_result("kivi-roundtrip:bits=8,backend=mlx", kl_mean=0.3)
    verdict = judge(make_night(good, bad), config)
    assert (verdict.of(good.cell_key), verdict.of(bad.cell_key), verdict.of("unknown")) == ("pass", "fail", "fail")


def test_every_threshold_has_a_metric():
    assert set(METRICS) == set(Thresholds.model_fields) - {"tiers"}


def test_a_bad_tier_is_shown_and_fails_nothing(make_result, make_night):
    config = NightlyConfig(specs=("full",), thresholds={"kivi*": Thresholds(kl_mean=1.0)})
    result = make_result(kl_mean=0.9)
    verdict = judge(make_night(result), config)
    assert verdict.passed
    assert verdict.standings[result.cell_key].tier == "bad"


@pytest.mark.parametrize("bounds", [(0.2, 0.1), (-0.1, 0.1), (0.1,), ("a", 1)], ids=str)
def test_bounds_of_a_tier_are_two_numbers_that_do_not_fall(bounds):
    with pytest.raises(ValidationError, match="tiers"):
        Thresholds.model_validate({"tiers": {"kl_mean": bounds}})
