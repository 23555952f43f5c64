"""The backend that runs everywhere: plain MLX operations, attention by ``mx.quantized_matmul`` on the packed codes."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from kivi.backends import Availability, History, Packed
from kivi.quantize import group_quantize, group_roundtrip, pack


def available() -> Availability:
    """Return that this backend runs here: it needs nothing but MLX."""
    return Availability(True, f"plain MLX operations on the {mx.default_device().type.name}")


class MLXBackend:
    """Plain MLX operations; see :class:`kivi.backends.Backend`.

    Attention equals standard attention on the dequantised history up to rounding: relative to the largest output, 1e-5 in
    float32 and 1e-2 in float16 and bfloat16.
    """

    name: Literal["mlx"] = "mlx"

    def group_roundtrip(self, x: mx.array, *, bits: int, group_size: int, axis: int, param_dtype: mx.Dtype) -> mx.array:
        """Return what :func:`kivi.quantize.group_roundtrip` returns."""
        return group_roundtrip(x, bits=bits, group_size=group_size, axis=axis, param_dtype=param_dtype)

    def quantize_keys(self, keys: mx.array, *, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
        """Quantise and pack keys ``[B, H, S, D]``; ``S`` is a whole number of groups."""
        codes, scale, zero = group_quantize(keys, bits=bits, group_size=group_size, axis=-2, param_dtype=param_dtype)
        return Packed(pack(codes.swapaxes(-1, -2), bits), scale.swapaxes(-1, -2), zero.swapaxes(-1, -2))

    def quantize_values(self, values: mx.array, *, bits: int, group_size: int, param_dtype: mx.Dtype) -> Packed:
        """Quantise and pack values ``[B, H, S, D]``."""
        codes, scale, zero = group_quantize(values, bits=bits, group_size=group_size, axis=-1, param_dtype=param_dtype)
        return Packed(pack(codes, bits), scale, zero)

    def decode_attention(
        self,
        queries: mx.array,
        history: History,
        *,
        scale: float,
        causal: bool,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend with a few queries on codes; see :meth:`kivi.backends.Backend.decode_attention`.

        Works on the whole capacity and hides what lies beyond the counts: a slice of codes would be copied at each call.
        """
        batch, heads, length, _ = queries.shape
        kv_heads = history.window_keys.shape[1]
        grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads * length, -1)
        scores = mx.concatenate(_scores(grouped, history), axis=-1)
        scores = scores.reshape(batch, heads, length, -1)
        scores = _hide(scores, _seen(history, length, causal), mask)
        if sinks is not None:
            logits = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (batch, heads, length, 1))
            scores = mx.concatenate([scores, logits], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)
        if sinks is not None:
            weights = weights[..., :-1]
        out = _weighted_values(weights.reshape(*grouped.shape[:3], -1), history)
        return out.reshape(batch, heads, length, -1).astype(queries.dtype)


def _scores(queries: mx.array, history: History) -> list[mx.array]:
    """Return ``q K^T`` of each stretch, ``[B, H, rows, capacity]``, in storage order."""
    parts = []
    if history.sink_keys is not None:
        parts.append(queries @ history.sink_keys.swapaxes(-1, -2))
    if history.keys is not None:
        parts.append(
            mx.quantized_matmul(queries, *history.keys, transpose=False, group_size=history.group_size, bits=history.key_bits)
        )
    parts.append(queries @ history.window_keys.swapaxes(-1, -2))
    return parts


def _weighted_values(weights: mx.array, history: History) -> mx.array:
    """Return ``p V`` summed over the stretches, ``[B, H, rows, D_v]``."""
    window_start = weights.shape[-1] - history.window_values.shape[-2]
    out = weights[..., window_start:] @ history.window_values
    start = 0
    if history.sink_values is not None:
        start = history.sink_values.shape[-2]
        out = out + weights[..., :start] @ history.sink_values
    if history.values is not None:
        bits, group_size = history.value_bits, history.group_size
        part = mx.quantized_matmul(
            weights[..., start:window_start], *history.values, transpose=False, group_size=group_size, bits=bits
        )
        out = out + part[..., : out.shape[-1]]  # a ragged last group is padded in storage
    return out


def _seen(history: History, length: int, causal: bool) -> mx.array | None:
    """Return which columns a query may see by the counts and by causality, ``[B or 1, 1, L or 1, N]``; None if all."""
    stretches = [
        (history.sink_keys, history.sink_count),
        (None if history.values is None else history.values.words, history.code_count),
        (history.window_keys, history.window_count),
    ]
    present = [(array.shape[-2], count) for array, count in stretches if array is not None]
    if not causal and all(isinstance(count, int) and count == capacity for capacity, count in present):
        return None
    parts = [mx.arange(capacity) < _column(count) for capacity, count in present]
    if causal:
        capacity, count = present[-1]
        newest = mx.arange(length - 1, -1, -1)[:, None]  # tokens of the call that come after each query's own
        parts[-1] = mx.arange(capacity) < _column(count) - newest
        parts = [mx.broadcast_to(part, (*part.shape[:-2], length, part.shape[-1])) for part in parts]
    return mx.concatenate(parts, axis=-1)


def _column(count: int | mx.array) -> mx.array:
    """Return a count as ``[B or 1, 1, 1, 1]``."""
    return mx.array(count, mx.int32).reshape(-1, 1, 1, 1)


def _hide(scores: mx.array, seen: mx.array | None, mask: mx.array | None) -> mx.array:
    """Return the scores with the mask applied and minus infinity where nothing is to be seen."""
    if mask is not None and mask.dtype == mx.bool_:
        # Finite, as in mx.fast.scaled_dot_product_attention: a row that is masked throughout gives no NaN.
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return scores if seen is None else mx.where(seen, scores, -mx.inf)


BACKEND = MLXBackend()
