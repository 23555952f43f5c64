"""The plain MLX backend: codes equal the definition bit for bit, attention equals fused attention within a bound."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kivi.backends.mlx as mlx_backend
from kivi.backends import ATTENTION_BOUND, History, available, resolve
from kivi.backends.mlx import BACKEND
from kivi.cache.single import KIVICache
from kivi.codec import Codec, Codecs, Packed
from kivi.quantize import QuantizedGroups, group_dequantize, group_quantize, group_roundtrip, pack, unpack
from kivi.spec import CacheSpec

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import attention_bound

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
PARAMS = [mx.float16, mx.float32]


def defined_keys(keys: mx.array, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
    codes, scale, zero = group_quantize(keys, bits=bits, group_size=group_size, axis=-2, param_dtype=param_dtype)
    return Packed(pack(codes.swapaxes(-1, -2), bits), scale.swapaxes(-1, -2), zero.swapaxes(-1, -2))


def defined_values(values: mx.array, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
    codes, scale, zero = group_quantize(values, bits=bits, group_size=group_size, axis=-1, param_dtype=param_dtype)
    return Packed(pack(codes, bits), scale, zero)


def same(ours: Packed, theirs: Packed) -> bool:
    return all(a.dtype == b.dtype and mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


def test_it_is_available_everywhere_and_found_by_name():
    assert available("mlx").ok
    assert resolve("mlx") is BACKEND


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 32, 64, 72, 80])),
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    param_dtype=st.sampled_from(PARAMS),
    size=st.sampled_from([1e-30, 1e-7, 1e-3, 1.0, 100.0, 60000.0]),
    offset=st.sampled_from([0.0, 300.0, -7.0]),
    seed=st.integers(0, 1000),
)
def test_codes_scales_and_zeros_are_those_of_the_definition(shape, bits, group_size, dtype, param_dtype, size, offset, seed):
    batch, heads, groups, dim = shape
    x = mx.random.uniform(-1, 1, (batch, heads, groups * group_size, dim), key=mx.random.key(seed))
    x = (x * size + offset).astype(dtype)
    rules = {"bits": bits, "group_size": group_size, "param_dtype": param_dtype}
    assert same(BACKEND.quantize(x, Codec(axis=-2, **rules)), defined_keys(x, **rules))
    assert same(BACKEND.quantize(x, Codec(axis=-1, **rules)), defined_values(x, **rules))
    for axis in (-1, -2):
        assert mx.array_equal(
            BACKEND.group_roundtrip(x, Codec(axis=axis, **rules)), group_roundtrip(x, axis=axis, **rules)
        ).item()


@pytest.mark.parametrize("param_dtype", PARAMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [0.0, -0.0, 3.5, 1e-40, 65000.0])
def test_constant_groups_are_those_of_the_definition(special, dtype, param_dtype):
    x = mx.full((1, 1, 64, 64), special).astype(dtype)
    rules = {"bits": 2, "group_size": 32, "param_dtype": param_dtype}
    assert same(BACKEND.quantize(x, Codec(axis=-2, **rules)), defined_keys(x, **rules))
    assert same(BACKEND.quantize(x, Codec(axis=-1, **rules)), defined_values(x, **rules))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("lane", [0, 5, 31])
def test_a_group_that_is_not_finite_has_parameters_that_say_so_and_leaves_the_others_alone(bad, dtype, lane):
    x = mx.random.normal((1, 2, 64, 64)).astype(dtype)
    x[0, 1, 32 + lane, 32 + lane] = bad
    rules = {"bits": 4, "group_size": 32, "param_dtype": mx.float16}
    for ours, theirs, group in (
        (BACKEND.quantize(x, Codec(axis=-2, **rules)), defined_keys(x, **rules), (0, 1, 32 + lane, 1)),
        (BACKEND.quantize(x, Codec(axis=-1, **rules)), defined_values(x, **rules), (0, 1, 32 + lane, 1)),
    ):
        assert mx.array_equal(ours.scale, theirs.scale, equal_nan=True).item()
        assert mx.array_equal(ours.zero, theirs.zero, equal_nan=True).item()
        assert mx.isnan(ours.scale[group]).item() and mx.sum(mx.isnan(ours.scale)).item() == 1
        differing = mx.array(unpack(ours.words, 4) != unpack(theirs.words, 4)).reshape(*ours.words.shape[:3], -1, 32)
        assert mx.sum(mx.any(differing, axis=-1)).item() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_told_by_its_bits_whatever_its_sign(dtype):
    inf, nan = float("inf"), float("nan")
    groups = mx.array([[1.0, -2.0], [inf, -inf], [-0.0, 0.0], [nan, 1.0], [-1.0, -nan], [inf, nan]]).astype(dtype)
    assert mlx_backend._has_nan(groups, -1).tolist() == [False, False, False, True, True, True]


def history(
    *,
    batch=2,
    kv_heads=2,
    key_dim=32,
    value_dim=48,
    sinks=0,
    codes=64,
    capacity=256,
    window=20,
    dtype=mx.float32,
    bits=(4, 2),
    mean=0.0,
) -> tuple[History, mx.array, mx.array]:
    """Return a history with spare capacities, filled with what must not be seen, and its keys and values dequantised."""

    def draw(count: int, dim: int) -> mx.array:
        return (mean + mx.random.normal((batch, kv_heads, count, dim))).astype(dtype)

    key_bits, value_bits = bits
    codecs = Codecs.of(key_bits=key_bits, value_bits=value_bits, group_size=32, param_dtype=mx.float16)
    packed_keys = BACKEND.quantize(draw(capacity, key_dim), codecs.keys)
    packed_values = BACKEND.quantize(draw(capacity, value_dim), codecs.values)
    stored = History(
        codecs=codecs,
        sink_keys=draw(sinks, key_dim) if sinks else None,
        sink_values=draw(sinks, value_dim) if sinks else None,
        keys=packed_keys,
        values=packed_values,
        window_keys=draw(window + 9, key_dim),
        window_values=draw(window + 9, value_dim),
        sink_count=sinks,
        code_count=codes,
        window_count=window,
    )
    keys = QuantizedGroups(*(unpack(packed_keys.words, key_bits), *packed_keys[1:]))
    keys = QuantizedGroups(*(array.swapaxes(-1, -2) for array in keys))
    values = QuantizedGroups(unpack(packed_values.words, value_bits), *packed_values[1:])
    restored_keys = group_dequantize(keys, group_size=32, axis=-2, dtype=dtype)
    restored_values = group_dequantize(values, group_size=32, axis=-1, dtype=dtype, length=value_dim)
    return stored, restored_keys, restored_values


def standard(stored: History, keys: mx.array, values: mx.array, queries: mx.array, row: int = 0, **options) -> mx.array:
    """Return fused attention of sequence ``row`` on the tokens that are there, in order."""

    def count(of: int | mx.array) -> int:
        return of if isinstance(of, int) else int(of[row])

    pick = slice(row, row + 1)
    parts = [
        (stored.sink_keys, stored.sink_values, stored.sink_count),
        (keys, values, stored.code_count),
        (stored.window_keys, stored.window_values, stored.window_count),
    ]
    present = [(k[pick, :, : count(n)], v[pick, :, : count(n)]) for k, v, n in parts if k is not None]
    k, v = (mx.concatenate(list(each), axis=-2) for each in zip(*present, strict=True))
    return mx.fast.scaled_dot_product_attention(queries[pick], k, v, scale=0.2, **options)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("sinks", [0, 32])
@pytest.mark.parametrize("length", [1, 5])
def test_rows_of_different_lengths_see_their_own_tokens_alone(length, sinks, heads):
    mx.random.seed(1)
    stored, keys, values = history(sinks=sinks)
    stored = replace(
        stored, sink_count=mx.array([sinks, 0]), code_count=mx.array([224, 32]), window_count=mx.array([20, 7], mx.int32)
    )
    queries = mx.random.normal((2, heads, length, 32))
    logits = mx.random.normal((heads,))
    out = BACKEND.decode_attention(queries, stored, scale=0.2, causal=True, mask=None, sinks=logits)
    for row in range(2):
        expected = standard(stored, keys, values, queries, row, mask="causal", sinks=logits)
        assert mx.allclose(out[row : row + 1], expected, atol=1e-5).item()


@pytest.mark.parametrize("dtype", ATTENTION_BOUND)
@pytest.mark.parametrize(("codes", "mean"), [(256, 0.0), (16384, 1.0)], ids=["short", "long, values far from zero"])
def test_attention_keeps_its_bound_in_every_dtype(dtype, codes, mean):
    mx.random.seed(2)
    stored, keys, values = history(dtype=dtype, codes=codes, capacity=codes, bits=(4, 4), batch=1, mean=mean)
    queries = mx.random.normal((1, 4, 1, 32)).astype(dtype)
    out = BACKEND.decode_attention(queries, stored, scale=0.2, causal=False, mask=None, sinks=None)
    as_float = [array.astype(mx.float32) for array in (keys, values, queries)]
    windows = {name: getattr(stored, name).astype(mx.float32) for name in ("window_keys", "window_values")}
    expected = standard(replace(stored, **windows), *as_float)
    assert out.dtype == dtype
    assert mx.max(mx.abs(out - expected)).item() < ATTENTION_BOUND[dtype] * mx.max(mx.abs(expected)).item()


def test_attention_keeps_a_bound_with_channels_eight_times_as_large():
    """The history of seed 62 is the one of 250 that goes beyond the bound for ordinary numbers."""
    mx.random.seed(62)
    sizes = mx.where(mx.arange(32) % 2 == 1, 8.0, 1.0)
    keys, values = (mx.random.normal((1, 1, 600, 32)) * size for size in (sizes, 1.0))
    cache = KIVICache(CacheSpec(key_bits=8, value_bits=8, residual_length=0, backend="mlx"))
    cache.update_and_fetch(keys.astype(mx.bfloat16), values.astype(mx.bfloat16))
    mx.eval(cache.state)
    queries, scale = mx.random.normal((1, 1, 1, 32)).astype(mx.bfloat16), 32**-0.5
    history = cache.keys_and_values()
    exact = (part.astype(mx.float32) for part in (queries, *history))
    expected = mx.fast.scaled_dot_product_attention(*exact, scale=scale)
    error, largest = (mx.max(mx.abs(x)).item() for x in (cache.attend(queries, scale=scale) - expected, expected))
    assert ATTENTION_BOUND[mx.bfloat16] * largest < error < attention_bound(queries, *history, scale)


@pytest.mark.parametrize(("batch", "length", "axis"), [(1, 2, 2), (2, 1, 0), (1, 3, 1), (3, 2, 2)])
@pytest.mark.parametrize("masked", [None, "boolean", "additive", "by head"])
def test_shares_on_several_streams_give_what_one_gives(batch, length, axis, masked, monkeypatch):
    mx.random.seed(5)
    stored, _, _ = history(batch=batch, kv_heads=3, sinks=32, codes=256)
    if batch > 1:
        stored = replace(stored, code_count=mx.array([256, 32, 128][:batch]))
    queries, logits = mx.random.normal((batch, 6, length, 32)), mx.random.normal((6,))
    noise = mx.random.normal((batch, 6, length, 32 + 256 + 29))
    mask = {None: None, "boolean": noise[0, 0] > -1, "additive": noise[:, :1], "by head": noise}[masked]
    options = {"scale": 0.2, "causal": True, "mask": mask, "sinks": logits}
    alone = BACKEND.decode_attention(queries, stored, **options)
    mx.eval(alone)
    monkeypatch.setattr(mlx_backend, "STREAM_CODES", 1)
    monkeypatch.setattr(mlx_backend, "STREAMS", [mx.new_thread_local_stream(mx.cpu) for _ in range(2)])
    newer = mx.arange(length - 1, -1, -1)
    cut, shares = mlx_backend._share_out(mlx_backend.Share(queries, stored, mask, logits, newer))
    assert (cut, len(shares)) == ((axis, 2) if mx.default_device() == mx.cpu else (0, 1))
    assert mx.allclose(BACKEND.decode_attention(queries, stored, **options), alone, atol=1e-6).item()


def test_what_lies_beyond_the_counts_is_never_seen_whatever_the_mask_says():
    mx.random.seed(3)
    stored, keys, values = history(batch=1)
    queries = mx.random.normal((1, 2, 1, 32))
    columns = 256 + 29
    expected = standard(stored, keys, values, queries)
    for mask in (mx.ones((1, 1, 1, columns), mx.bool_), mx.full((columns,), 5.0)):
        out = BACKEND.decode_attention(queries, stored, scale=0.2, causal=False, mask=mask, sinks=None)
        assert mx.allclose(out, expected, atol=1e-5).item()


def test_without_codes_it_is_attention_on_the_window():
    mx.random.seed(4)
    stored, keys, values = history(batch=1)
    bare = replace(stored, keys=None, values=None, code_count=0)
    queries = mx.random.normal((1, 2, 3, 32))
    out = BACKEND.decode_attention(queries, bare, scale=0.2, causal=True, mask=None, sinks=None)
    expected = standard(bare, keys[:, :, :0], values[:, :, :0], queries, mask="causal")
    assert mx.allclose(out, expected, atol=1e-5).item()
