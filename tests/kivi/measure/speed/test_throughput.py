from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kivi.measure import MeasureError
from kivi.measure.arms import FULL, Arm, batch
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.settings import ThroughputSettings
from kivi.measure.speed import throughput
from kivi.measure.speed.throughput import measure_throughput
from kivi.measure.speed.timing import time_arm, time_run
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

Tiny = Callable[..., LoadedModel]
SETTINGS = ThroughputSettings(rounds=3, contexts=(48, 64), steps=3)
ROUNDTRIP = CacheSpec.parse("kivi-roundtrip:bits=2,residual=0,backend=mlx")
PACKED = CacheSpec.parse("kivi:bits=2,residual=0,backend=mlx")


def test_every_arm_is_timed_beside_the_full_cache(tiny: Tiny, texts: list[str], monitor: Monitor) -> None:
    timed = measure_throughput(tiny(), texts, [ROUNDTRIP, PACKED], SETTINGS, monitor=monitor, seed=0)
    assert list(timed) == ["full", ROUNDTRIP.slug, PACKED.slug]
    for figures in timed.values():
        assert not isinstance(figures, str)
        assert [context.context for context in figures.contexts] == [48, 64]
        last = figures.contexts[-1]
        assert figures.decode_tps == last.decode_tps.median
        assert len(last.decode_tps.rounds) == 3
        for ttft, rate in zip(last.time_to_first_token_s.rounds, last.prefill_tps.rounds, strict=True):
            assert rate == pytest.approx(64 / ttft)
    full, packed = timed["full"], timed[PACKED.slug]
    assert not isinstance(full, str) and not isinstance(packed, str)
    assert full.decode_ratio == full.prefill_ratio == 1
    pairs = zip(packed.contexts[-1].decode_tps.rounds, full.contexts[-1].decode_tps.rounds, strict=True)
    assert packed.contexts[-1].decode_ratio.rounds == pytest.approx([own / base for own, base in pairs])
    assert packed.contexts[-1].decode_ratio_interval is not None
    assert packed.baseline_spread == full.baseline_spread
    assert packed.host_ms_full == full.host_ms_full == full.host_ms
    assert packed.host_ms is not None
    assert 0 < packed.host_ms != full.host_ms


def test_arms_take_turns_and_each_round_has_a_prompt_of_its_own(
    tiny: Tiny, texts: list[str], monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, tuple[int, ...], int]] = []

    def spy(model: LoadedModel, spec: CacheSpec, prompt: Any, steps: int) -> Any:
        runs.append((spec.slug, tuple(prompt), steps))
        return time_run(model, spec, prompt, steps)

    monkeypatch.setattr(throughput, "time_run", spy)
    settings = ThroughputSettings(rounds=3, contexts=(48,), steps=5)
    measure_throughput(tiny(), texts, [ROUNDTRIP, PACKED], settings, monitor=monitor, seed=0)
    rounds = [runs[start : start + 3] for start in range(0, len(runs), 3)]
    assert len(rounds) == 4  # the warm-up and three that count
    assert all({slug for slug, _, _ in turn} == {"full", ROUNDTRIP.slug, PACKED.slug} for turn in rounds)
    assert all(len({prompt for _, prompt, _ in turn}) == 1 for turn in rounds)
    assert len({turn[0][1] for turn in rounds}) == 4
    assert len({turn[0][0] for turn in rounds}) == 3  # nobody is always first
    assert [turn[0][2] for turn in rounds] == [throughput.WARM_UP_STEPS, 5, 5, 5]


def test_work_that_a_cache_defers_is_paid_by_the_region_that_caused_it(tiny: Tiny) -> None:
    """A cache plants a costly lazy graph at every prefill call; decoding must not pay for it."""
    model, prompt = tiny(), batch([list(range(60))])
    plain = Arm(model, FULL)
    time_arm(plain, prompt, 3)
    arm = Arm(model, FULL)
    lazy, (rounds, cost) = arm.caches[0], _costly_rounds()
    update = lazy.update_and_fetch

    def plant(keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[2] > 1:
            lazy.deferred = _costly(rounds)
        return update(keys, values)

    lazy.update_and_fetch = plant
    timed = time_arm(arm, prompt, 3)
    assert timed.first_token > 0.5 * cost
    assert timed.decode < 0.5 * cost
    start = time.perf_counter()
    mx.eval(lazy.deferred)
    assert time.perf_counter() - start < 0.1 * cost  # nothing was left


def _costly(rounds: int) -> mx.array:
    x = mx.ones((512, 512))
    for _ in range(rounds):
        x = mx.sin(x @ x * 1e-3)
    return x


def _costly_rounds() -> tuple[int, float]:
    """Return how many rounds cost so much that decoding a tiny model is nothing beside it, and their seconds."""
    rounds, seconds = 32, 0.0
    while seconds < 0.3:
        rounds *= 2
        start = time.perf_counter()
        mx.eval(_costly(rounds))
        seconds = time.perf_counter() - start
    return rounds, seconds


def test_an_arm_that_fails_says_why_and_the_others_go_on(tiny: Tiny, texts: list[str], monitor: Monitor) -> None:
    broken = CacheSpec.parse("mlx-quantized:bits=2,group=128")  # head_dim 32 holds no group of 128
    timed = measure_throughput(tiny(), texts, [broken, ROUNDTRIP], SETTINGS, monitor=monitor, seed=0)
    assert isinstance(timed[broken.slug], str)
    assert "SpecError" in str(timed[broken.slug])
    assert not isinstance(timed[ROUNDTRIP.slug], str)
    assert not isinstance(timed["full"], str)


def test_without_a_baseline_there_is_no_throughput(tiny: Tiny, texts: list[str], monitor: Monitor) -> None:
    model = tiny()
    del model.model.model.norm.weight
    with pytest.raises(MeasureError, match="the full cache cannot be timed"):
        measure_throughput(model, texts, [ROUNDTRIP], SETTINGS, monitor=monitor, seed=0)


def test_a_deadline_stops_the_rounds(tiny: Tiny, texts: list[str]) -> None:
    with pytest.raises(DeadlineError, match="warm-up: stopped at 0 of 16"):
        measure_throughput(tiny(), texts, [ROUNDTRIP], SETTINGS, monitor=Monitor(deadline_s=1e-9), seed=0)


def test_texts_too_short_for_the_context_are_one_sentence(tiny: Tiny, monitor: Monitor) -> None:
    with pytest.raises(MeasureError, match="4 different prompts of 48 tokens need 51 tokens, the 1 texts have 7"):
        measure_throughput(tiny(), ["short"], [], SETTINGS, monitor=monitor, seed=0)
