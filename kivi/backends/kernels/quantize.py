"""Launches of the round-trip and packing kernels."""

from __future__ import annotations

import math

import mlx.core as mx

from kivi.backends.kernels.program import Grid, Kernel, Prepared, Target, constant
from kivi.backends.kernels.settings import element_settings
from kivi.codec import Codec, Packed

THREADS = 128
LANE_CHANNELS = 8  # channels of a value that one thread holds

ROUNDTRIP_KEYS = Kernel("roundtrip_keys", ("x", "sizes"), ("out",), THREADS, ("quantize.h",))
ROUNDTRIP_VALUES = Kernel("roundtrip_values", ("x", "sizes"), ("out",), THREADS, ("quantize.h", "values.h"))
PACK_KEYS = Kernel("pack_keys", ("x", "sizes"), ("words", "scale", "zero"), THREADS, ("quantize.h",))
PACK_VALUES = Kernel("pack_values", ("x", "sizes"), ("words", "scale", "zero"), THREADS, ("quantize.h", "values.h"))


def group_roundtrip(target: Target, x: mx.array, codec: Codec) -> mx.array:
    """Return what :meth:`kivi.codec.Codec.roundtrip` returns, bit for bit, in one pass over ``x``."""
    kernel = ROUNDTRIP_KEYS if codec.axis == -2 else ROUNDTRIP_VALUES
    sizes, groups = _grid(x, codec)
    run = Prepared(target, kernel, element_settings(codec, x), groups=groups, outputs=[(x.shape, x.dtype)])
    return run([x, sizes])[0]


def quantize(target: Target, x: mx.array, codec: Codec) -> Packed:
    """Quantise and pack keys or values ``[B, H, S, D]``; see :class:`kivi.codec.Packed`.

    Raises:
        ValueError: keys are not of whole groups of tokens.
    """
    *leading, tokens, channels = x.shape
    if codec.axis == -2 and tokens % codec.group_size:
        raise ValueError(f"{tokens} tokens: keys are packed in whole groups of {codec.group_size}")
    kernel = PACK_KEYS if codec.axis == -2 else PACK_VALUES
    sizes, groups = _grid(x, codec)
    words, params = codec.shapes(tokens, channels)
    outputs = [((*leading, *words), mx.uint32), *[((*leading, *params), codec.param_dtype)] * 2]
    return Packed(*Prepared(target, kernel, element_settings(codec, x), groups=groups, outputs=outputs)([x, sizes]))


def _grid(x: mx.array, codec: Codec) -> tuple[mx.array, Grid]:
    """Return the sizes that a kernel reads, and its threadgroups: a thread takes a group of keys, or a lane of values."""
    *leading, tokens, channels = x.shape
    arrays = math.prod(leading)
    sizes: tuple[int, ...]
    if codec.axis == -2:
        groups = codec.groups(codec.padded(tokens))
        threads, sizes = arrays * groups * channels, (tokens, channels, groups, arrays)
    else:
        threads, sizes = arrays * tokens * codec.padded(channels) // LANE_CHANNELS, (arrays * tokens,)
    return constant(sizes, mx.uint32), (-(-threads // THREADS), 1, 1)
