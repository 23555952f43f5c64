"""Rotated caches: the answers are those of standard attention on the same rounded numbers, not rotated."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from kivi.cache.batch import BatchKIVICache
from kivi.cache.packed import MAX_CODE_QUERIES, SHORT_CALL
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.quantize import group_roundtrip
from kivi.rotation import RotationError, rotate, rotate_back
from kivi.spec import CacheSpec

HEADS, KEY_DIM, VALUE_DIM, SCALE = 2, 64, 80, 0.2
ROTATIONS = ["keys", "values", "both"]
# What the rounding of outputs, of rotated tokens and of their way back comes to, as a share of the largest output.
BOUNDS = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def spec(rotated: str, **fields) -> CacheSpec:
    defaults = {"key_bits": 3, "value_bits": 3, "residual_length": 20, "sink_length": 32, "backend": "mlx"}
    return CacheSpec(**{**defaults, "rotate": rotated, **fields})


def tokens(count: int, *, batch: int = 1, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Return keys and values of which a few channels are large, which is what a rotation spreads."""
    first, second = mx.random.split(mx.random.key(seed))
    keys = mx.random.normal((batch, HEADS, count, KEY_DIM), key=first)
    keys = keys + 20 * (mx.arange(KEY_DIM) % 31 == 3)
    return keys.astype(dtype), mx.random.normal((batch, HEADS, count, VALUE_DIM), key=second).astype(dtype)


def queries(count: int, *, batch: int = 1, seed: int = 9, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((batch, 3 * HEADS, count, KEY_DIM), key=mx.random.key(seed)).astype(dtype)


def filled(rotated: str, count: int = 200, last: int = 1, **fields) -> KIVICache:
    """Return a cache of ``count`` tokens, the ``last`` of them its last call."""
    dtype = fields.pop("dtype", mx.float32)
    cache, pair = KIVICache(spec(rotated, **fields)), tokens(count, dtype=dtype)
    for start, stop in ((0, count - last), (count - last, count)):
        cache.update_and_fetch(*(part[..., start:stop, :] for part in pair))
    return cache


def distance(out: mx.array, expected: mx.array) -> float:
    error = mx.abs(out.astype(mx.float32) - expected.astype(mx.float32)).max()
    return (error / mx.abs(expected.astype(mx.float32)).max()).item()


def masks(length: int, columns: int) -> dict[str, mx.array | str | None]:
    noise = mx.random.normal((3 * HEADS, length, columns), key=mx.random.key(4))
    return {"none": None, "causal": "causal", "boolean": noise > -0.5, "additive": noise}


@pytest.mark.parametrize("rotated", ROTATIONS)
@pytest.mark.parametrize("length", [1, 5, MAX_CODE_QUERIES + 30])  # on codes, and by fused attention as in prefill
def test_masks_and_attention_sinks_give_what_the_unrotated_numbers_give(rotated, length):
    cache = filled(rotated, last=length)
    keys, values = cache.keys_and_values()
    logits = mx.random.normal((3 * HEADS,), key=mx.random.key(5))
    for name, mask in masks(length, 200).items():
        for sinks in (None, logits):
            out = cache.attend(queries(length), scale=SCALE, mask=mask, sinks=sinks)
            expected = mx.fast.scaled_dot_product_attention(queries(length), keys, values, scale=SCALE, mask=mask, sinks=sinks)
            assert distance(out, expected) < BOUNDS[mx.float32], (name, sinks is None)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("length", [1, MAX_CODE_QUERIES + 30])
def test_each_dtype_keeps_its_rounding(dtype, length):
    cache = filled("both", last=length, dtype=dtype)
    exact = [part.astype(mx.float32) for part in (queries(length, dtype=dtype), *cache.keys_and_values())]
    out = cache.attend(queries(length, dtype=dtype), scale=SCALE, mask="causal")
    expected = mx.fast.scaled_dot_product_attention(*exact, scale=SCALE, mask="causal")
    assert out.dtype == dtype
    assert distance(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("rotated", ROTATIONS)
def test_what_comes_out_is_what_went_in_but_for_the_quantiser(rotated):
    cache, pair = filled(rotated), tokens(200)
    fetched = cache.update_and_fetch(*tokens(3, seed=7))
    assert all(mx.array_equal(*each) for each in zip(fetched, tokens(3, seed=7), strict=True))
    cache.trim(3)
    for out, exact, axis, name in zip(cache.dequantized(), pair, (-2, -1), ("keys", "values"), strict=True):
        there, back = (rotate, rotate_back) if rotated in (name, "both") else (mx.array, mx.array)
        old = back(group_roundtrip(there(exact[..., 32:160, :]), bits=3, group_size=32, axis=axis))
        assert mx.abs(out[..., 32:160, :] - old).max().item() < 1e-4
        for stretch in (slice(0, 32), slice(160, None)):
            assert mx.abs(out[..., stretch, :] - exact[..., stretch, :]).max().item() < 1e-4


def test_a_rotation_shrinks_the_error_of_values_with_a_few_large_channels():
    """Of two bits; the large channels take a group's whole range, unless they are spread."""
    exact = tokens(200)[1] * (1 + 30 * (mx.arange(VALUE_DIM) % 40 == 5))
    errors = {}
    for rotated in ("none", "values"):
        cache = KIVICache(spec(rotated, value_bits=2, sink_length=0, residual_length=0))
        cache.update_and_fetch(exact[..., :KEY_DIM], exact)
        errors[rotated] = mx.mean((cache.dequantized()[1] - exact) ** 2).item()
    assert 0 < errors["values"] < 0.8 * errors["none"]


@pytest.mark.parametrize("rotated", ROTATIONS)
def test_state_file_copy_and_trim_stay_in_the_basis(rotated, tmp_path: Path):
    cache = filled(rotated)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    others = (loaded, copy.deepcopy(cache), KIVICache.from_state(cache.state))
    for each in (cache, *others):
        each.trim(90)  # into the codes
        each.update_and_fetch(*tokens(91, seed=3))
    for other in others:
        assert other.spec == cache.spec
        assert mx.array_equal(other.attend(queries(1), scale=SCALE), cache.attend(queries(1), scale=SCALE))
        assert all(mx.array_equal(*pair) for pair in zip(other.keys_and_values(), cache.keys_and_values(), strict=True))
    keys, values = cache.keys_and_values()
    expected = mx.fast.scaled_dot_product_attention(queries(1), keys, values, scale=SCALE)
    assert distance(cache.attend(queries(1), scale=SCALE), expected) < BOUNDS[mx.float32]
    assert cache.bytes().is_honest


def test_a_full_cache_is_converted_into_the_basis():
    full = KVCache()
    full.update_and_fetch(*tokens(200))
    converted, fed = KIVICache.from_full(full, spec("both")), KIVICache(spec("both"))
    fed.update_and_fetch(*tokens(200))
    for name, array in fed.state.items():
        assert mx.array_equal(converted.state[name], array) if isinstance(array, mx.array) else converted.state[name] == array


@pytest.mark.parametrize("rotated", ROTATIONS)
def test_a_batch_answers_as_the_unrotated_numbers_of_its_rows(rotated):
    lengths = (200, 75)
    caches = [KIVICache(spec(rotated)) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        cache.update_and_fetch(*tokens(length, seed=length))
    batch = KIVICache.merge(caches)
    assert isinstance(batch, BatchKIVICache)
    for length in (1, SHORT_CALL + 1):
        mask = batch.make_mask(length)
        batch.update_and_fetch(*tokens(length, batch=2, seed=length))
        asked = queries(length, batch=2)
        out = batch.attend(asked, scale=SCALE, mask=mask)
        expected = mx.fast.scaled_dot_product_attention(asked, *batch.keys_and_values(), scale=SCALE, mask=mask)
        assert distance(out, expected) < BOUNDS[mx.float32]
    for row, cache in enumerate(caches):
        taken = batch.extract(row)
        for length in (1, SHORT_CALL + 1):
            cache.update_and_fetch(*(part[row : row + 1] for part in tokens(length, batch=2, seed=length)))
        assert all(mx.array_equal(*pair) for pair in zip(taken.dequantized(), cache.dequantized(), strict=True))


def test_the_round_trip_cache_rounds_in_the_basis_what_the_packed_cache_rounds():
    packed, rounded = filled("both", last=1), RoundTripKIVICache(spec("both", kind="kivi-roundtrip"))
    fetched = rounded.update_and_fetch(*tokens(200))
    for ours, theirs in zip(fetched, packed.dequantized(), strict=True):
        assert mx.abs(ours - theirs).max().item() < 1e-4


@pytest.mark.parametrize("cache", [KIVICache(spec("keys")), RoundTripKIVICache(spec("keys", kind="kivi-roundtrip"))])
def test_channels_that_cannot_be_rotated_are_refused(cache):
    wide = mx.zeros((1, 1, 120, 72))
    with pytest.raises(RotationError, match="72 channels cannot be rotated"):
        cache.update_and_fetch(wide, mx.zeros((1, 1, 120, 64)))
    assert cache.offset == 0
    cache.update_and_fetch(*tokens(40))
    values_only = KIVICache(spec("values"))
    values_only.update_and_fetch(wide, mx.zeros((1, 1, 120, 64)))
    assert values_only.offset == 120
