"""Speed by backend: arms take turns on equal inputs, new ones each round; what cannot run says why."""

from __future__ import annotations

import itertools
import time
from typing import Any

import mlx.core as mx
import pytest

from kivi.backends import BackendError
from kivi.backends.mlx import MLXBackend
from kivi.cache.overflow import NonFiniteError
from kivi.codec import Codec
from kivi.measure import MeasureError
from kivi.measure.backends.speed import Lane, SpeedSettings, time_lanes, time_operations
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.spec import CacheSpec

SETTINGS = SpeedSettings(
    rounds=3,
    calls=2,
    dtype="float32",
    kv_heads=1,
    query_heads=2,
    head_dim=32,
    flush_tokens=(32, 40),
    contexts=(96,),
)
CASE: dict[str, Any] = {"operation": "round trip", "tokens": 1, "shape": "none", "dtype": "float32"}
SPEC = CacheSpec.parse("kivi:bits=2,residual=32")


def lane(arm: str, log: list[tuple[str, str, int]], *, own: bool = False, seconds: float = 0.0) -> Lane:
    def prepare(index: int) -> Any:
        log.append(("prepare", arm, index))

        def run() -> mx.array:
            log.append(("run", arm, index))
            time.sleep(seconds)
            return mx.zeros(1)

        return run

    return Lane(arm, own, prepare, 1)


def test_arms_take_turns_and_none_always_follows_the_same_one():
    log: list[tuple[str, str, int]] = []
    time_lanes([lane("a", log), lane("b", log), lane("c", log)], 12, "a", **CASE)
    runs = [(arm, index) for what, arm, index in log if what == "run"]
    assert runs[:3] == [("a", 12), ("b", 12), ("c", 12)]  # the warm-up, on a round of its own
    rounds = [runs[start : start + 3] for start in range(3, len(runs), 3)]
    assert all(
        {arm for arm, _ in turn} == set("abc") and {at for _, at in turn} == {index} for index, turn in enumerate(rounds)
    )
    followed = {(before, after) for turn in rounds for (before, _), (after, _) in itertools.pairwise(turn)}
    assert followed == set(itertools.permutations("abc", 2))


def test_ratios_pair_the_arms_of_a_round():
    log: list[tuple[str, str, int]] = []
    timed = time_lanes([lane("slow", log, seconds=0.04), lane("fast", log, seconds=0.01)], 3, "slow", **CASE)
    slow, fast = timed.arms
    assert slow.ratio.rounds == [1.0] * 3 and fast.ratio.median > 1.5
    expected = [ours / theirs for ours, theirs in zip(slow.seconds.rounds, fast.seconds.rounds, strict=True)]
    assert fast.ratio.rounds == pytest.approx(expected)
    assert timed.baseline_spread == pytest.approx((slow.seconds.maximum - slow.seconds.minimum) / slow.seconds.median)


def refusing(arm: str, error: Exception, *, own: bool) -> Lane:
    def prepare(index: int) -> Any:
        raise error

    return Lane(arm, own, prepare, 1)


def test_a_refusal_by_mlx_on_a_gpu_was_not_run_and_a_failing_kernel_failed(monkeypatch):
    monkeypatch.setattr("kivi.measure.backends.skip_reason.on_gpu", lambda: True)
    words = "[quantized_matmul] No implementation for problem shape"
    lanes = [
        refusing("full", RuntimeError(words), own=False),
        refusing("metal", RuntimeError("out of memory"), own=True),
        refusing("cuda", BackendError("kernel attention failed"), own=True),
        lane("mlx", []),
    ]
    timed = time_lanes(lanes, 2, "full", **CASE)
    full, metal, cuda, mlx = timed.arms
    assert words in full.not_run and not full.failed
    assert "out of memory" in metal.failed and cuda.failed == "kernel attention failed" and not metal.not_run
    assert mlx.seconds is not None and mlx.ratio is None and timed.baseline_spread is None


@pytest.mark.parametrize("error", [RuntimeError("no implementation"), MeasureError("too short"), NonFiniteError("layer 3")])
def test_on_a_cpu_and_with_an_error_of_its_own_an_arm_has_failed(error, monkeypatch):
    monkeypatch.setattr("kivi.measure.backends.skip_reason.on_gpu", lambda: type(error) is not RuntimeError)
    timed = time_lanes([refusing("full", error, own=False), lane("mlx", [])], 2, "full", **CASE)
    assert str(error) in timed.arms[0].failed and not timed.arms[0].not_run


def test_a_deadline_ends_a_comparison_and_is_filed_nowhere():
    with pytest.raises(DeadlineError, match="deadline 60 s"):
        time_lanes([refusing("full", DeadlineError("stopped, deadline 60 s"), own=False)], 2, "full", **CASE)


def test_every_operation_is_timed_at_every_size():
    cases = list(time_operations([MLXBackend()], SPEC, SETTINGS, Monitor()))
    assert [(case.operation, case.tokens, case.baseline) for case in cases] == [
        ("round trip", 32, "mlx"),
        ("quantise and pack", 32, "mlx"),
        ("round trip", 40, "mlx"),
        ("quantise and pack", 32, "mlx"),
        ("decode attention", 96, "full"),
    ]
    assert [arm.arm for arm in cases[0].arms] == ["mlx", "mlx compiled"]
    assert [arm.arm for arm in cases[1].arms] == ["mlx", "mx.quantize"]
    assert [arm.arm for arm in cases[4].arms] == ["full", "mlx"]
    for case in cases:
        assert all(arm.seconds and arm.seconds.minimum > 0 and len(arm.seconds.rounds) == 3 for arm in case.arms)


def test_the_round_trip_cache_has_neither_codes_nor_attention_on_them():
    cases = list(time_operations([MLXBackend()], CacheSpec.parse("kivi-roundtrip:bits=4"), SETTINGS, Monitor()))
    assert [case.operation for case in cases] == ["round trip", "round trip"]


class Notes(MLXBackend):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[mx.array] = []

    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        self.seen.append(x)
        return super().group_roundtrip(x, codec)


def test_no_two_timed_calls_get_the_same_input():
    backend = Notes()
    list(time_operations([backend], CacheSpec.parse("kivi-roundtrip:bits=4"), SETTINGS, Monitor()))
    inputs = [x for x in backend.seen if x.shape[-2] == 32]
    assert len(inputs) == (SETTINGS.rounds + 1) * SETTINGS.calls * 2
    for index, x in enumerate(inputs):
        assert not any(mx.array_equal(x, other).item() for other in inputs[:index])
