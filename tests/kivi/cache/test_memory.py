"""What a KIVICache costs by MLX's own meter, which knows nothing of the cache's bookkeeping."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.cache.single import KIVICache
from kivi.cache.storage import CODE_STEP, GROWTH, code_capacity, live_arrays
from kivi.spec import CacheSpec

PAGE = 16384  # MLX rounds an allocation up to a page at most


def spec(**fields) -> CacheSpec:
    return CacheSpec(**{"kind": "kivi", "backend": "mlx", "residual_length": 32, **fields})


def tokens(count: int, *, heads=4, dim=64, dtype=mx.float32, seed=0) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, heads, count, dim), key=mx.random.key(seed)).astype(dtype)
    return keys, values


def active_memory() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def weigh(make) -> tuple[KIVICache, int]:
    """Return the cache that ``make`` returns, all of it evaluated, and the bytes that MLX holds more than before."""
    before = active_memory()
    cache = make()
    mx.eval(list(live_arrays(vars(cache))), list(live_arrays(cache.state)))
    return cache, active_memory() - before


def witnesses_agree(cache: KIVICache, grown: int) -> bool:
    slack = PAGE * len(list(live_arrays(vars(cache))))
    return abs(grown - cache.bytes().resident) <= slack


def filled(calls: list[int], cache: KIVICache, *, heads=4, dim=64, dtype=mx.float32) -> KIVICache:
    """Feed the cache, and attend with up to 16 queries a call."""
    for seed, count in enumerate(calls):
        cache.update_and_fetch(*tokens(count, heads=heads, dim=dim, dtype=dtype, seed=seed))
        queries = mx.ones((1, heads, min(count, 16), dim), dtype)
        mx.eval(cache.attend(queries, scale=0.1, mask="causal"))
    return cache


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize(
    "calls", [[2000], [10], [700, 700, 700], [300] + [1] * 120, [100, 7, 7, 7, 7, 7]], ids=lambda calls: f"{len(calls)}-calls"
)
def test_mlx_holds_the_bytes_that_the_cache_reports(calls, dtype):
    cache, grown = weigh(lambda: filled(calls, KIVICache(spec(sink_length=32)), dtype=dtype))
    assert witnesses_agree(cache, grown), (grown, cache.bytes())


def test_trimming_into_the_codes_gives_memory_back():
    def trimmed() -> KIVICache:
        cache = filled([4000], KIVICache(spec()))
        cache.trim(3900)
        return cache

    cache, grown = weigh(trimmed)
    assert witnesses_agree(cache, grown), (grown, cache.bytes())
    assert grown < 0.25 * filled([4000], KIVICache(spec())).bytes().resident


def test_a_state_set_from_views_pins_nothing():
    def from_views() -> KIVICache:
        return KIVICache.from_state(filled([2000], KIVICache(spec())).state)

    cache, grown = weigh(from_views)
    assert witnesses_agree(cache, grown), (grown, cache.bytes())


class KeepsTheKeys(KIVICache):
    """A cache that lies: it keeps what it was given."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.kept = {"deep": [keys]}
        return super().update_and_fetch(keys, values)


class HidesTheKeys(KIVICache):
    """A cache that lies better: it keeps what it was given where no attribute shows it."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.kept = lambda: keys
        return super().update_and_fetch(keys, values)


def test_a_cache_that_keeps_an_array_is_found_dishonest():
    assert not filled([500], KeepsTheKeys(spec())).bytes().is_honest


def test_a_cache_that_hides_an_array_is_caught_by_mlx():
    cache, grown = weigh(lambda: filled([2000], HidesTheKeys(spec())))
    assert cache.bytes().is_honest
    assert not witnesses_agree(cache, grown)


def test_a_decode_step_copies_no_history_also_when_it_quantises():
    """Peak memory over steps that fit the capacity stays below half of what a copy of the key codes would take."""
    cache = filled([4000, 1], KIVICache(spec(key_bits=8, value_bits=8, param_dtype="float32")), heads=1, dim=512)
    codes, frontier, peaks = cache.bytes().key_codes, cache.frontier, []
    for _ in range(40):
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        filled([1], cache, heads=1, dim=512)
        peaks.append(mx.get_peak_memory() - base)
    assert cache.frontier > frontier
    assert max(peaks) < 0.5 * codes, (peaks, codes)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_spare_codes_are_bounded_however_they_came(count, full):
    full = min(full, count - 1)
    capacity = code_capacity(count, full)
    assert capacity % CODE_STEP == 0
    assert max(count, full + full // GROWTH) <= capacity < count + count / GROWTH + CODE_STEP


def test_a_prompt_gets_no_more_room_than_the_next_step():
    cache = filled([4 * CODE_STEP], KIVICache(spec(residual_length=0)))
    window_token = 4 * 2 * 64 * 4  # heads, keys and values, channels, bytes
    weight = cache.bytes()  # settles the last group
    assert cache.frontier == cache.offset and weight.spare == 32 * window_token


def test_a_code_is_copied_about_32_times_in_a_long_decode():
    capacity = copied = 0
    for count in range(32, 1 << 20, 32):
        if count > capacity:
            copied += capacity
            capacity = code_capacity(count, capacity)
    assert copied < 1.1 * GROWTH * count


def test_memory_over_many_decode_steps_is_that_of_the_codes():
    """Only what attention returns is evaluated, as in mlx-lm's decoding: no graph may pile up behind the state."""
    cache = filled([64], KIVICache(spec()))
    before, weight = active_memory(), cache.bytes().resident
    filled([1] * 1500, cache)
    grown = active_memory() - before
    assert abs(grown - (cache.bytes().resident - weight)) <= PAGE * len(list(live_arrays(vars(cache))))
