"""The laws of the quantiser, which every cache and kernel inherits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kivi.quantize import (
    QuantizedGroups,
    group_dequantize,
    group_quantize,
    group_roundtrip,
    pack,
    padded_length,
    smallest_scale,
    unpack,
)
from kivi.spec import GROUP_SIZES, KIVI_BITS, MLX_BITS

BITS = st.sampled_from(KIVI_BITS)
GROUPS = st.sampled_from([32, 64, 128])
AXES = st.sampled_from([-1, -2])
DTYPES = st.sampled_from([mx.float32, mx.float16, mx.bfloat16])
PARAMS = st.sampled_from([mx.float16, mx.float32])
# Subnormal inputs are left out: whether they are flushed to zero is the processor's business.
FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
ARRAYS = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=70), elements=FLOATS)


def reference_roundtrip(x: np.ndarray, bits: int, group: int, axis: int, param: type) -> np.ndarray:
    """The definition once more, group by group in numpy, sharing no line with kivi.quantize."""
    levels, floor = np.float32(2**bits - 1), param(2.0**-24 if param is np.float16 else 1e-8)
    out = np.empty_like(x)
    lines = np.moveaxis(x, axis, -1)
    result = np.moveaxis(out, axis, -1)
    for line in np.ndindex(lines.shape[:-1]):
        for start in range(0, lines.shape[-1], group):
            members = lines[line][start : start + group]
            low, high = members.min(), members.max()
            scale = max(param(np.float32(high - low) / levels), floor)
            zero = param(low)
            codes = np.clip(np.rint((members - np.float32(zero)) / np.float32(scale)), 0, levels)
            result[line][start : start + group] = codes * np.float32(scale) + np.float32(zero)
    return out


@given(ARRAYS, BITS, GROUPS, AXES, st.sampled_from([np.float16, np.float32]))
def test_equals_an_independent_definition_bit_for_bit(x, bits, group, axis, param):
    ours = group_roundtrip(
        mx.array(x), bits=bits, group_size=group, axis=axis, param_dtype=mx.float16 if param is np.float16 else mx.float32
    )
    assert np.array_equal(np.array(ours), reference_roundtrip(x, bits, group, axis, param))


@given(ARRAYS, BITS, GROUPS, AXES, DTYPES, PARAMS)
def test_shapes_dtypes_and_code_range(x, bits, group, axis, dtype, params):
    x = mx.array(x).astype(dtype)
    quantized = group_quantize(x, bits=bits, group_size=group, axis=axis, param_dtype=params)
    padded = list(x.shape)
    padded[axis] = padded_length(x.shape[axis], group)
    groups = list(padded)
    groups[axis] //= group
    assert quantized.codes.shape == tuple(padded)
    assert quantized.codes.dtype == mx.uint8
    assert quantized.scale.shape == quantized.zero.shape == tuple(groups)
    assert quantized.scale.dtype == quantized.zero.dtype == params
    assert quantized.codes.max().item() <= 2**bits - 1
    restored = group_roundtrip(x, bits=bits, group_size=group, axis=axis, param_dtype=params)
    assert restored.shape == x.shape
    assert restored.dtype == x.dtype


@given(ARRAYS, BITS, GROUPS, AXES)
def test_error_is_at_most_half_a_step(x, bits, group, axis):
    x = mx.array(x)
    quantized = group_quantize(x, bits=bits, group_size=group, axis=axis, param_dtype=mx.float32)
    restored = group_dequantize(quantized, group_size=group, axis=axis, dtype=mx.float32, length=x.shape[axis])
    scale = mx.repeat(quantized.scale, group, axis=axis)
    steps = scale[..., : x.shape[-2], :] if axis == -2 else scale[..., : x.shape[-1]]
    # float32 arithmetic on numbers up to 1e4 adds a few units in the last place to the half step
    slack = 8 * np.finfo(np.float32).eps * mx.abs(x).max().item()
    assert mx.all(mx.abs(restored - x) <= 0.5 * steps + slack).item()


@given(st.data(), BITS)
def test_pack_and_unpack_are_inverse(data, bits):
    shape = (*data.draw(hnp.array_shapes(max_dims=3, max_side=4)), data.draw(st.sampled_from([32, 64, 96])))
    codes = mx.array(data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1))))
    words = pack(codes, bits)
    assert words.dtype == mx.uint32
    assert words.nbytes * 8 == codes.size * bits
    assert mx.array_equal(unpack(words, bits), codes)


@pytest.mark.parametrize("bits", KIVI_BITS)
def test_packed_triple_is_what_quantized_matmul_takes(bits):
    values = mx.random.normal((2, 3, 40, 64), key=mx.random.key(bits))
    weights = mx.random.normal((2, 3, 5, 40), key=mx.random.key(9))
    groups = group_quantize(values, bits=bits, group_size=32, axis=-1)
    on_codes = mx.quantized_matmul(
        weights, pack(groups.codes, bits), groups.scale, groups.zero, transpose=False, group_size=32, bits=bits
    )
    exact = weights @ group_dequantize(groups, group_size=32, axis=-1, dtype=mx.float32)
    assert mx.abs(on_codes - exact).max().item() < 1e-4


def test_codes_are_packed_low_bits_first():
    codes = mx.array([1, 2, 3, 0] + [0] * 12, mx.uint8)
    assert pack(codes, 2).item() == 1 | 2 << 2 | 3 << 4


def test_codes_of_three_bits_cross_words():
    codes = mx.array([0] * 10 + [5, 0, 7] + [0] * 8 + [6] + [0] * 10, mx.uint8)
    assert pack(codes, 3).tolist() == [(5 << 30) % 2**32, 5 >> 2 | 7 << 4 | (6 << 31) % 2**32, 6 >> 1]


@pytest.mark.parametrize("bits", MLX_BITS)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_the_words_are_those_of_mlx(bits, group):
    words, scale, zero = mx.quantize(mx.random.normal((5, 256), key=mx.random.key(bits)), group_size=group, bits=bits)
    codes = unpack(words, bits)
    assert codes.shape == (5, 256) and len(set(codes.reshape(-1).tolist())) > 2 ** (bits - 1)
    assert mx.array_equal(pack(codes, bits), words)
    restored = group_dequantize(QuantizedGroups(codes, scale, zero), group_size=group, axis=-1, dtype=mx.float32)
    assert mx.array_equal(restored, mx.dequantize(words, scale, zero, group_size=group, bits=bits))


def test_halves_round_to_even():
    x = mx.array([[0.0, 0.5, 1.5, 2.5, 3.0] + [0.0] * 27])
    restored = group_roundtrip(x, bits=2, group_size=32, axis=-1, param_dtype=mx.float32)
    assert restored[0, :5].tolist() == [0, 0, 2, 2, 3]


@given(
    row=st.integers(0, 63),
    column=st.integers(0, 63),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    axis=AXES,
)
def test_a_non_finite_element_shows_in_the_parameters_of_its_group_only(row, column, poison, axis):
    x = mx.random.normal((64, 64), key=mx.random.key(1))
    x[row, column] = poison
    groups = group_quantize(x, bits=4, group_size=32, axis=axis)
    bad = ~(mx.isfinite(groups.scale) & mx.isfinite(groups.zero))
    assert bad.sum().item() == 1
    assert bad[row // 32, column].item() if axis == -2 else bad[row, column // 32].item()


def test_a_range_beyond_float16_shows_in_the_parameters():
    x = mx.full((32, 1), 70000.0)
    assert not mx.isfinite(group_quantize(x, bits=4, group_size=32, axis=-2, param_dtype=mx.float16).zero).all().item()
    assert mx.array_equal(group_roundtrip(x, bits=4, group_size=32, axis=-2, param_dtype=mx.float32), x)


def test_the_smallest_scale_survives_its_dtype():
    for dtype in (mx.float16, mx.float32):
        assert mx.array(smallest_scale(dtype)).astype(dtype).item() > 0
