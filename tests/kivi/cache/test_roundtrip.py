"""RoundTripKIVICache: which tokens are rounded, what it says of itself, and what it refuses."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.quantize import group_quantize, group_roundtrip
from kivi.rotation import rotate, rotate_back
from kivi.spec import CacheSpec, SpecError


def spec(**fields) -> CacheSpec:
    return CacheSpec(**{"kind": "kivi-roundtrip", "backend": "mlx", "residual_length": 32, **fields})


def tokens(count: int, heads: int = 2, dim: int = 32, dtype: mx.Dtype = mx.float32, seed: int = 0) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, 1, heads, count, dim), key=mx.random.key(seed)).astype(dtype)
    return keys, values


def feed(cache: RoundTripKIVICache, keys: mx.array, values: mx.array, cuts: list[int]) -> tuple[mx.array, mx.array]:
    fetched = None
    for start, stop in zip([0, *cuts], [*cuts, keys.shape[2]], strict=True):
        if stop > start:
            fetched = cache.update_and_fetch(keys[..., start:stop, :], values[..., start:stop, :])
    assert fetched is not None
    return fetched


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 199), max_size=12),
    residual=st.sampled_from([0, 1, 32, 40]),
    sinks=st.sampled_from([0, 32]),
    bits=st.sampled_from([2, 3, 4, 8]),
    rotate=st.sampled_from(["none", "both"]),
)
def test_the_state_does_not_depend_on_how_the_sequence_was_cut(count, cuts, residual, sinks, bits, rotate):
    keys, values = tokens(count)
    what = spec(residual_length=residual, sink_length=sinks, key_bits=bits, value_bits=bits, rotate=rotate)
    at_once, chunked = RoundTripKIVICache(what), RoundTripKIVICache(what)
    whole = feed(at_once, keys, values, [])
    parts = feed(chunked, keys, values, sorted(cut for cut in cuts if cut < count))
    assert at_once.frontier == chunked.frontier
    assert all(mx.array_equal(a, b).item() for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("rotated", ["none", "both"])
@pytest.mark.parametrize("sinks", [0, 32])
def test_rounded_are_whole_groups_between_sinks_and_window_and_nothing_else(sinks, rotated):
    keys, values = tokens(200)
    cache = RoundTripKIVICache(spec(sink_length=sinks, rotate=rotated))
    there, back = (rotate, rotate_back) if rotated == "both" else (mx.array, mx.array)
    fetched_keys, fetched_values = feed(cache, keys, values, [7, 50, 51])
    assert cache.frontier == 160
    for exact, fetched, axis in ((keys, fetched_keys, -2), (values, fetched_values, -1)):
        rounded = back(group_roundtrip(there(exact[..., sinks:160, :]), bits=2, group_size=32, axis=axis))
        expected = mx.concatenate([exact[..., :sinks, :], rounded, exact[..., 160:, :]], axis=-2)
        assert mx.array_equal(fetched, expected)


def test_trim_into_the_window_leaves_no_trace():
    keys, values = tokens(120)
    cache, fresh = RoundTripKIVICache(spec()), RoundTripKIVICache(spec())
    feed(cache, keys, values, [])
    assert cache.trim(20) == 20
    again = cache.update_and_fetch(keys[..., 100:, :], values[..., 100:, :])
    straight = feed(fresh, keys, values, [])
    assert all(mx.array_equal(a, b).item() for a, b in zip(again, straight, strict=True))


def test_what_grows_again_after_a_deep_trim_is_rounded_in_its_own_groups():
    keys, values = tokens(200)
    cache, fresh = RoundTripKIVICache(spec()), RoundTripKIVICache(spec())
    feed(cache, keys, values, [])
    assert cache.trim(104) == 104
    again = cache.update_and_fetch(*(array[..., 96:, :] for array in tokens(200, seed=1)))
    joined = [
        mx.concatenate([old[..., :96, :], new[..., 96:, :]], axis=-2)
        for old, new in zip(tokens(200), tokens(200, seed=1), strict=True)
    ]
    straight = feed(fresh, *joined, [])
    assert all(mx.array_equal(a, b).item() for a, b in zip(again, straight, strict=True))


def test_a_group_that_was_cut_moves_by_at_most_a_step_of_its_new_group():
    keys, values = tokens(200)
    cache = RoundTripKIVICache(spec())
    before = feed(cache, keys, values, [])
    cache.trim(90)  # keeps 110 tokens: 96..109 are of a group that was cut
    after = cache.update_and_fetch(*(array[..., 110:, :] for array in tokens(200, seed=1)))
    for old, new, axis in zip(before, after, (-2, -1), strict=True):
        assert mx.array_equal(old[..., :96, :], new[..., :96, :])
        scale = group_quantize(new[..., 96:128, :], bits=2, group_size=32, axis=axis).scale
        steps = mx.broadcast_to(scale, (1, 2, 32, 32))[..., :14, :]
        assert mx.all(mx.abs(old - new)[..., 96:110, :] <= 1.01 * steps).item()


@pytest.mark.parametrize(("asked", "trimmed", "left"), [(-3, 0, 50), (0, 0, 50), (60, 50, 0)])
def test_trim_is_clamped(asked, trimmed, left):
    cache = RoundTripKIVICache(spec())
    feed(cache, *tokens(50), [])
    assert cache.trim(asked) == trimmed
    assert cache.offset == left


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_it_is_honest_that_it_saves_nothing(dtype):
    cache = RoundTripKIVICache(spec())
    assert cache.bytes().resident == 0
    feed(cache, *tokens(200, dtype=dtype), [])
    live = cache.bytes()
    assert live.resident == cache.keys.nbytes + cache.values.nbytes == 2 * 2 * 256 * 32 * dtype.size
    assert live.is_honest
    assert live.accounted == live.full_precision == 2 * 2 * 200 * 32 * dtype.size


def test_the_seeds_scene_is_billed_like_for_like():
    """200 tokens, heads x head_dim = 256, b=2, G=R=32: 131,072 bytes live for keys, 15,360 estimated for 160 tokens."""
    cache = RoundTripKIVICache(spec())
    feed(cache, *tokens(200, heads=4, dim=64, dtype=mx.float16), [])
    estimate = cache.packed_bytes()
    assert cache.keys.nbytes == 131_072
    assert estimate.key_codes + estimate.key_params == 15_360
    assert pytest.approx(5.33, abs=0.01) == 160 * 256 * 2 / 15_360
    assert estimate.residual == 2 * 40 * 256 * 2
    assert not estimate.is_honest


def test_a_trim_rolls_the_estimate_back():
    keys, values = tokens(200)
    cache, fresh = RoundTripKIVICache(spec()), RoundTripKIVICache(spec())
    feed(cache, keys, values, [])
    cache.trim(104)
    feed(fresh, keys[..., :96, :], values[..., :96, :], [])
    cache.update_and_fetch(keys[..., 96:, :], values[..., 96:, :])
    fresh.update_and_fetch(keys[..., 96:, :], values[..., 96:, :])
    assert cache.packed_bytes() == fresh.packed_bytes()


def test_saved_and_loaded_it_is_the_same_cache(tmp_path):
    keys, values = tokens(120)
    cache = RoundTripKIVICache(spec(key_bits=4))
    feed(cache, keys[..., :100, :], values[..., :100, :], [])
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert type(loaded) is RoundTripKIVICache
    assert (loaded.spec, loaded.offset, loaded.frontier) == (cache.spec, cache.offset, cache.frontier)
    more = loaded.update_and_fetch(keys[..., 100:, :], values[..., 100:, :])
    same = cache.update_and_fetch(keys[..., 100:, :], values[..., 100:, :])
    assert all(mx.array_equal(a, b).item() for a, b in zip(more, same, strict=True))


def test_a_copy_lives_on_its_own():
    keys, values = tokens(64)
    cache = RoundTripKIVICache(spec())
    feed(cache, keys, values, [])
    copied = copy.deepcopy(cache)
    copied.update_and_fetch(*tokens(64, seed=1))
    assert (cache.offset, cache.frontier) == (64, 32)


def test_it_never_becomes_another_cache_in_silence():
    cache = RoundTripKIVICache(spec())
    assert not hasattr(cache, "merge")  # so mlx-lm's server takes it one request at a time
    with pytest.raises(AttributeError, match="no batched form"):
        cache.merge([cache])
    with pytest.raises(SpecError, match="quantised already"):
        cache.to_quantized(bits=4)
    with pytest.raises(SpecError, match="takes the kivi-roundtrip spec"):
        RoundTripKIVICache(CacheSpec(kind="kivi"))
