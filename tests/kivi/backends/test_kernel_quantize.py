"""The round-trip and packing kernels equal kivi.quantize bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kivi.backends import Backend
from kivi.backends.host import HostTarget
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import Program, read_source
from kivi.codec import Codec, Packed
from kivi.quantize import group_quantize, group_roundtrip, pack

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

# Every pair of dtype, bits and group occurs, with both parameter dtypes and whole, ragged and odd numbers of channels.
CONFIGURATIONS = [
    (mx.float16, 2, 32, mx.float16, 128),
    (mx.float16, 3, 32, mx.float16, 72),
    (mx.float16, 4, 64, mx.float32, 72),
    (mx.float16, 8, 128, mx.float16, 33),
    (mx.bfloat16, 2, 64, mx.float16, 80),
    (mx.bfloat16, 3, 128, mx.float32, 33),
    (mx.bfloat16, 4, 128, mx.float16, 128),
    (mx.bfloat16, 8, 32, mx.float32, 96),
    (mx.float32, 2, 128, mx.float32, 5),
    (mx.float32, 3, 64, mx.float16, 128),
    (mx.float32, 4, 32, mx.float16, 64),
    (mx.float32, 8, 64, mx.float32, 72),
]


def hard_inputs(tokens: int, channels: int, levels: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Return ``[7, 2, tokens, channels]``: one kind of difficulty a row."""
    rng = np.random.default_rng(seed)
    shape = (2, tokens, channels)
    kinds = [
        rng.normal(size=shape),
        np.full(shape, 3.7),
        rng.choice([0.0, levels, *(np.arange(levels) + 0.5)], size=shape, p=[0.25, 0.25, *[0.5 / levels] * levels]),
        rng.normal(size=shape) + np.where(np.arange(channels) == 3, 300.0, 0.0),
        rng.normal(size=shape) * 1e-7,
        rng.normal(size=shape) * 1e4,
        rng.choice([-0.0, 0.0, 1e-3], size=shape),
    ]
    return mx.array(np.stack(kinds).astype(np.float32)).astype(dtype)


def assert_same_bits(actual: mx.array, expected: mx.array) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    kind = mx.uint32 if actual.dtype.size == 4 else mx.uint16
    same = (actual.view(kind) == expected.view(kind)) | (mx.isnan(actual) & mx.isnan(expected))
    assert mx.all(same).item(), f"{mx.sum(~same).item()} of {same.size} differ"


def packed_by_definition(x: mx.array, axis: int, bits: int, group_size: int, params: mx.Dtype) -> Packed:
    quantized = group_quantize(x, bits=bits, group_size=group_size, axis=axis, param_dtype=params)
    arrays = [array.swapaxes(-1, -2) if axis == -2 else array for array in quantized]
    return Packed(pack(arrays[0], bits), arrays[1], arrays[2])


@pytest.mark.parametrize(("dtype", "bits", "group_size", "params", "channels"), CONFIGURATIONS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_round_trip_equals_the_definition(
    backend: Backend, axis: int, dtype: mx.Dtype, bits: int, group_size: int, params: mx.Dtype, channels: int
) -> None:
    for tokens in (1, group_size - 1, group_size, 2 * group_size + 3):
        x = hard_inputs(tokens, channels, (1 << bits) - 1, dtype, seed=tokens)
        arguments = {"bits": bits, "group_size": group_size, "axis": axis, "param_dtype": params}
        assert_same_bits(backend.group_roundtrip(x, Codec(**arguments)), group_roundtrip(x, **arguments))


@pytest.mark.parametrize(("dtype", "bits", "group_size", "params", "channels"), CONFIGURATIONS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_packed_codes_and_parameters_equal_the_definition(
    backend: Backend, axis: int, dtype: mx.Dtype, bits: int, group_size: int, params: mx.Dtype, channels: int
) -> None:
    codec = Codec(bits, group_size, axis, params)
    for tokens in (group_size, 3 * group_size):
        x = hard_inputs(tokens, channels, (1 << bits) - 1, dtype, seed=tokens)
        packed = backend.quantize(x, codec)
        for actual, expected in zip(packed, packed_by_definition(x, axis, bits, group_size, params), strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "bits", "group_size", "params", "channels"), [row for row in CONFIGURATIONS if row[0] == mx.float32]
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_words_are_in_the_layout_that_mlx_reads(
    backend: Backend, axis: int, dtype: mx.Dtype, bits: int, group_size: int, params: mx.Dtype, channels: int
) -> None:
    """On the CPU: on a GPU, MLX contracts products and sums."""
    codec = Codec(bits, group_size, axis, params)
    x = hard_inputs(2 * group_size, channels, codec.levels, dtype)
    words, scale, zero = backend.quantize(x, codec)
    with mx.stream(mx.cpu):
        scale, zero = scale.astype(mx.float32), zero.astype(mx.float32)
        restored = mx.dequantize(words, scale, zero, group_size=group_size, bits=bits)
        if axis == -2:
            restored = restored.swapaxes(-1, -2)
        assert_same_bits(restored[..., :channels], codec.roundtrip(x))


@given(
    x=hnp.arrays(np.float32, st.tuples(st.integers(1, 70), st.just(5)), elements=st.floats(-60000, 60000, width=16)),
    axis=st.sampled_from([-1, -2]),
    bits=st.sampled_from([2, 3, 4, 8]),
    dtype=st.sampled_from([mx.float16, mx.float32]),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_equals_the_definition_on_any_input(x: np.ndarray, axis: int, bits: int, dtype: mx.Dtype) -> None:
    backend = KernelBackend(ANY_INPUT)
    array = mx.array(x).astype(dtype)
    arguments = {"bits": bits, "group_size": 32, "axis": axis, "param_dtype": mx.float16}
    assert_same_bits(backend.group_roundtrip(array, Codec(**arguments)), group_roundtrip(array, **arguments))


ANY_INPUT = HostTarget()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_non_finite_element_shows_in_the_scale_of_its_group_alone(backend: Backend, poison: float, axis: int) -> None:
    x = np.random.default_rng(1).normal(size=(1, 1, 96, 64)).astype(np.float32)
    clean = mx.array(x).astype(mx.float16)
    x[0, 0, 40, 7] = poison
    codec = Codec(2, 32, axis, mx.float16)
    scale = backend.quantize(mx.array(x).astype(mx.float16), codec).scale
    expected = np.array(backend.quantize(clean, codec).scale)
    expected[(0, 0, 7, 1) if axis == -2 else (0, 0, 40, 0)] = np.nan
    np.testing.assert_array_equal(np.array(scale), expected)


def test_keys_are_packed_in_whole_groups_only(backend: Backend) -> None:
    with pytest.raises(ValueError, match="33 tokens: keys are packed in whole groups of 32"):
        backend.quantize(mx.zeros((1, 1, 33, 64)), Codec(2, 32, -2, mx.float16))


def test_the_short_division_equals_division() -> None:
    """``quotient`` replaces IEEE division; where codes can differ, from 2^-20 to 2^20, it must round the same."""
    rng = np.random.default_rng(3)
    y = np.exp2(rng.uniform(-24, 100, 400_000)).astype(np.float32)
    x = (y * np.exp2(rng.uniform(-20, 20, y.size))).astype(np.float32)
    halves = (np.arange(y.size) % 256 + 0.5).astype(np.float32) * y[::-1]
    for numerator, divisor in ((x, y), (halves, y[::-1].copy()), (np.nextafter(halves, np.float32(np.inf)), y[::-1].copy())):
        finite = np.isfinite(numerator)
        actual = _quotients(numerator[finite], divisor[finite])
        np.testing.assert_array_equal(actual, numerator[finite] / divisor[finite])


def _quotients(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    macros = "#define PARAM float\n#define LEVELS 3\n#define SMALLEST_SCALE 1e-8f\n"
    program = Program(
        name="test_quotient",
        inputs=("x", "y"),
        outputs=("out",),
        input_dtypes=(mx.float32, mx.float32),
        output_dtypes=(mx.float32,),
        header=read_source("preludes", "host.h") + macros + read_source("headers", "quantize.h"),
        source="const uint i = current_group.x * 32 + current_thread; out[i] = quotient(x[i], y[i], div_rn(1.0f, y[i]));",
    )
    size = -(-x.size // 32) * 32
    padded = [mx.array(np.pad(array, (0, size - x.size), constant_values=1)) for array in (x, y)]
    (out,) = HostTarget().build(program)(
        inputs=padded, grid=(size, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(size,)], output_dtypes=[mx.float32]
    )
    return np.array(out)[: x.size]
