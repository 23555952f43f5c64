"""Launches of the round-trip and packing kernels."""

from __future__ import annotations

import math

import mlx.core as mx

from kivi.backends import Packed
from kivi.backends.kernels.program import Grid, Kernel, Setting, Target, constant, launch
from kivi.quantize import padded_length, smallest_scale

THREADS = 128
LANE_CHANNELS = 8  # channels of a value that one thread holds

ROUNDTRIP_KEYS = Kernel("roundtrip_keys", ("x", "sizes"), ("out",), THREADS, ("quantize.h",))
ROUNDTRIP_VALUES = Kernel("roundtrip_values", ("x", "sizes"), ("out",), THREADS, ("quantize.h", "values.h"))
PACK_KEYS = Kernel("pack_keys", ("x", "sizes"), ("words", "scale", "zero"), THREADS, ("quantize.h",))
PACK_VALUES = Kernel("pack_values", ("x", "sizes"), ("words", "scale", "zero"), THREADS, ("quantize.h", "values.h"))


def group_roundtrip(target: Target, x: mx.array, *, bits: int, group_size: int, axis: int, param_dtype: mx.Dtype) -> mx.array:
    """Return what :func:`kivi.quantize.group_roundtrip` returns, bit for bit, in one pass over ``x``."""
    settings = _settings(x, bits, group_size, param_dtype)
    if axis == -2:
        kernel, sizes, groups = ROUNDTRIP_KEYS, *_key_grid(x, group_size)
    else:
        kernel, sizes, groups = ROUNDTRIP_VALUES, *_value_grid(x, group_size)
        settings |= _channels(x, group_size)
    (out,) = launch(target, kernel, tuple(settings.items()), [x, sizes], groups=groups, outputs=[(x.shape, x.dtype)])
    return out


def quantize_keys(target: Target, keys: mx.array, *, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
    """Quantise and pack keys ``[B, H, S, D]``, ``S`` a whole number of groups; see :class:`kivi.backends.Packed`."""
    *leading, tokens, channels = keys.shape
    if tokens % group_size:
        raise ValueError(f"{tokens} tokens: keys are packed in whole groups of {group_size}")
    sizes, groups = _key_grid(keys, group_size)
    params = (*leading, channels, tokens // group_size)
    outputs = [((*leading, channels, tokens * bits // 32), mx.uint32), (params, param_dtype), (params, param_dtype)]
    settings = _settings(keys, bits, group_size, param_dtype)
    return Packed(*launch(target, PACK_KEYS, tuple(settings.items()), [keys, sizes], groups=groups, outputs=outputs))


def quantize_values(target: Target, values: mx.array, *, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
    """Quantise and pack values ``[B, H, S, D]``; see :class:`kivi.backends.Packed`."""
    *leading, channels = values.shape
    padded = padded_length(channels, group_size)
    sizes, groups = _value_grid(values, group_size)
    params = (*leading, padded // group_size)
    outputs = [((*leading, padded * bits // 32), mx.uint32), (params, param_dtype), (params, param_dtype)]
    settings = _settings(values, bits, group_size, param_dtype) | _channels(values, group_size)
    return Packed(*launch(target, PACK_VALUES, tuple(settings.items()), [values, sizes], groups=groups, outputs=outputs))


def _settings(x: mx.array, bits: int, group_size: int, param_dtype: mx.Dtype) -> dict[str, Setting]:
    return {
        "ELEMENT": x.dtype,
        "PARAM": param_dtype,
        "BITS": bits,
        "LEVELS": (1 << bits) - 1,
        "GROUP": group_size,
        "SMALLEST_SCALE": smallest_scale(param_dtype),
    }


def _channels(x: mx.array, group_size: int) -> dict[str, Setting]:
    return {"CHANNELS": x.shape[-1], "PADDED": padded_length(x.shape[-1], group_size)}


def _key_grid(x: mx.array, group_size: int) -> tuple[mx.array, Grid]:
    *leading, tokens, channels = x.shape
    arrays, groups = math.prod(leading), -(-tokens // group_size)
    threads = arrays * groups * channels
    return constant((tokens, channels, groups, arrays), mx.uint32), (-(-threads // THREADS), 1, 1)


def _value_grid(x: mx.array, group_size: int) -> tuple[mx.array, Grid]:
    *leading, channels = x.shape
    rows = math.prod(leading)
    threads = rows * padded_length(channels, group_size) // LANE_CHANNELS
    return constant((rows,), mx.uint32), (-(-threads // THREADS), 1, 1)
