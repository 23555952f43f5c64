"""KIVI's quantiser, defined in plain MLX operations.

This module is the definition: every cache and every kernel equals it bit for bit. It follows section 3
of the KIVI paper (arXiv:2402.02750), asymmetric round-to-nearest in groups:

- keys are quantised per channel: a group is ``group_size`` consecutive *tokens* of one channel (``axis=-2``);
- values are quantised per token: a group is ``group_size`` consecutive *channels* of one token (``axis=-1``).

The rules, the same for both:

1. minimum and maximum of a group are taken in float32;
2. ``scale = (maximum - minimum) / (2**bits - 1)`` and ``zero = minimum`` are rounded to ``param_dtype``, the scale
   then raised to at least :func:`smallest_scale` so that a constant group divides by something;
3. ``code = clip(round((x - zero) / scale), 0, 2**bits - 1)``, computed in float32 from the *rounded* scale and zero,
   rounding half to even;
4. ``x' = code * scale + zero`` in float32, each operation rounded (no fused multiply-add), then cast to the dtype of
   the input.

A last group with too few elements is filled by repeating its last element, which changes neither minimum nor maximum.
A group that holds NaN or infinity, or whose range ``param_dtype`` cannot hold, gets a non-finite scale or zero: a look at
the parameters finds it. The codes of such a group are unspecified.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

WORD_BITS = 32  # MLX packs codes into uint32 words, low bits first.


class QuantizedGroups(NamedTuple):
    """Codes of an array and the parameters of its groups.

    ``codes`` is uint8 with the shape of the input, its grouped axis padded to whole groups. ``scale`` and ``zero`` have
    the same shape but for the grouped axis, which counts groups.
    """

    codes: mx.array
    scale: mx.array
    zero: mx.array


def smallest_scale(param_dtype: mx.Dtype) -> float:
    """Return the floor of a scale: 1e-8, or float16's smallest positive number (2**-24), which 1e-8 would underflow."""
    return 2.0**-24 if param_dtype == mx.float16 else 1e-8


def dtype_name(dtype: mx.Dtype) -> str:
    """Return ``float16`` for ``mlx.core.float16``."""
    return str(dtype).removeprefix("mlx.core.")


def padded_length(length: int, group_size: int) -> int:
    """Return ``length`` rounded up to whole groups."""
    return -(-length // group_size) * group_size


def group_quantize(
    x: mx.array, *, bits: int, group_size: int, axis: int, param_dtype: mx.Dtype = mx.float16
) -> QuantizedGroups:
    """Quantise ``x`` in groups along ``axis``.

    Args:
        x: ``[..., S, D]``, float32, float16 or bfloat16, ``S`` and ``D`` at least 1.
        bits: Bits a code, 1 to 8.
        group_size: Elements a group.
        axis: -2 to group along tokens (keys), -1 to group along channels (values).
        param_dtype: dtype of scale and zero, float16 or float32.

    Returns:
        Codes ``[..., S', D]`` with scale and zero ``[..., S'/G, D]`` for ``axis=-2``; codes ``[..., S, D']`` with scale
        and zero ``[..., S, D'/G]`` for ``axis=-1``; the primed length is padded to whole groups.
    """
    levels = (1 << bits) - 1
    grouped = _split_groups(x.astype(mx.float32), group_size, axis)
    low = mx.min(grouped, axis=-1)
    high = mx.max(grouped, axis=-1)
    # MLX's minimum skips NaN in its vectorised path, so non-finite elements are looked for on their own.
    finite = mx.all(mx.isfinite(grouped), axis=-1)
    scale = mx.where(finite, (high - low) / levels, mx.nan).astype(param_dtype)
    scale = mx.maximum(scale, mx.array(smallest_scale(param_dtype), param_dtype))
    zero = (low + 0.0).astype(param_dtype)  # + 0.0 turns -0.0 into 0.0, so that equal minima have equal bits
    exact = grouped - zero.astype(mx.float32)[..., None]
    codes = mx.clip(mx.round(exact / scale.astype(mx.float32)[..., None]), 0, levels).astype(mx.uint8)
    return QuantizedGroups(_join_groups(codes, axis), _restore_axis(scale, axis), _restore_axis(zero, axis))


def group_dequantize(
    quantized: QuantizedGroups, *, group_size: int, axis: int, dtype: mx.Dtype, length: int | None = None
) -> mx.array:
    """Return ``code * scale + zero`` in ``dtype``, the inverse of :func:`group_quantize` up to rounding.

    Args:
        quantized: What :func:`group_quantize` returned, with the same ``group_size`` and ``axis``.
        group_size: Elements a group.
        axis: The grouped axis, -1 or -2.
        dtype: dtype of the result.
        length: Elements to keep along ``axis``; the padding of a ragged last group is cut off. All by default.
    """
    codes = _split_groups(quantized.codes.astype(mx.float32), group_size, axis)
    scale = _axis_last(quantized.scale.astype(mx.float32), axis)[..., None]
    zero = _axis_last(quantized.zero.astype(mx.float32), axis)[..., None]
    restored = _join_groups(codes * scale + zero, axis).astype(dtype)
    if length is None or length == restored.shape[axis]:
        return restored
    return restored[..., :length, :] if axis == -2 else restored[..., :length]


def group_roundtrip(x: mx.array, *, bits: int, group_size: int, axis: int, param_dtype: mx.Dtype = mx.float16) -> mx.array:
    """Quantise ``x`` and dequantise it at once: same shape and dtype as ``x``, with the quantiser's error.

    Arguments as for :func:`group_quantize`.
    """
    quantized = group_quantize(x, bits=bits, group_size=group_size, axis=axis, param_dtype=param_dtype)
    return group_dequantize(quantized, group_size=group_size, axis=axis, dtype=x.dtype, length=x.shape[axis])


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes ``[..., N]`` into uint32 words ``[..., N * bits / 32]`` (MLX's layout).

    The words are one stream of bits, lowest first: codes of 3 bits cross from a word into the next. ``N * bits`` must be a
    multiple of 32, which whole groups of 32, 64 or 128 always are.
    """
    return _sum_bits(_bits(codes.astype(mx.uint32), bits), WORD_BITS)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Return the uint8 codes ``[..., W * 32 / bits]`` of uint32 words ``[..., W]``, the inverse of :func:`pack`."""
    return _sum_bits(_bits(words, WORD_BITS), bits).astype(mx.uint8)


def _bits(numbers: mx.array, width: int) -> mx.array:
    """Return the lowest ``width`` bits of uint32 numbers ``[..., N]``, lowest first: ``[..., N * width]``."""
    bits = (numbers[..., None] >> mx.arange(width, dtype=mx.uint32)) & 1
    return bits.reshape(*numbers.shape[:-1], -1)


def _sum_bits(bits: mx.array, width: int) -> mx.array:
    """Return the uint32 numbers ``[..., N]`` of ``width`` bits each, lowest first, ``[..., N * width]``."""
    numbers = bits.reshape(*bits.shape[:-1], -1, width) << mx.arange(width, dtype=mx.uint32)
    return mx.sum(numbers, axis=-1).astype(mx.uint32)


def _axis_last(x: mx.array, axis: int) -> mx.array:
    return x.swapaxes(-1, -2) if axis == -2 else x


_restore_axis = _axis_last  # swapping the last two axes is its own inverse


def _split_groups(x: mx.array, group_size: int, axis: int) -> mx.array:
    """Return ``[..., other, groups, group_size]``, the last group filled with its last element."""
    x = _axis_last(x, axis)
    missing = padded_length(x.shape[-1], group_size) - x.shape[-1]
    if missing:
        x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
    return x.reshape(*x.shape[:-1], -1, group_size)


def _join_groups(x: mx.array, axis: int) -> mx.array:
    return _restore_axis(x.reshape(*x.shape[:-2], -1), axis)
