"""The backend that runs everywhere: plain MLX operations, attention by ``mx.quantized_matmul`` on the packed codes.

Quantising computes what :mod:`kivi.quantize` defines, operation for operation, in the order that suits MLX: groups stay where
they are in memory, and codes are packed by a small matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from kivi.backends import Availability, History
from kivi.codec import Codec, Packed
from kivi.machine import cores
from kivi.quantize import WORD_BITS

# On a CPU an MLX stream is one thread, and so would attention be: it is shared out to a stream a core, at most this many.
STREAMS = [mx.new_thread_local_stream(mx.cpu) for _ in range(min(8, cores()))]
STREAM_CODES = 1 << 19  # codes of keys a stream unpacks at least: about 0.3 ms of work, ten times what handing it over costs

# What neighbouring codes are joined into on their way into words, by bits: an integer, and how many codes it takes.
LANES = {2: (mx.uint16, 8), 3: (mx.uint32, 8), 4: (mx.uint16, 4), 8: (mx.uint8, 1)}


def available() -> Availability:
    """Return that this backend runs here: it needs nothing but MLX."""
    return Availability(True, f"plain MLX operations on the {mx.default_device().type.name}")


class MLXBackend:
    """Plain MLX operations; see :class:`kivi.backends.Backend`.

    Attention keeps :data:`kivi.backends.ATTENTION_BOUND`, but for float32 on a GPU where MLX rounds products to TF32.
    """

    name: Literal["mlx"] = "mlx"

    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        """Return what :meth:`kivi.codec.Codec.roundtrip` returns."""
        return codec.roundtrip(x)

    def quantize(self, x: mx.array, codec: Codec) -> Packed:
        """Quantise and pack keys or values; see :meth:`kivi.backends.Backend.quantize`."""
        if codec.axis == -2:
            batch, heads, length, dim = x.shape
            grouped = x.reshape(batch, heads, codec.groups(length), codec.group_size, dim)
        else:
            missing = codec.padded(x.shape[-1]) - x.shape[-1]
            if missing:
                x = mx.concatenate([x, mx.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
            grouped = x.reshape(*x.shape[:-1], -1, codec.group_size)
        codes, scale, zero = _quantize(grouped, codec)
        lanes = _join_lanes(codes.reshape(x.shape), codec)
        if codec.axis == -1:
            return Packed(_join_words(lanes, codec), scale, zero)
        words = _join_words(mx.contiguous(lanes.swapaxes(-1, -2)), codec)
        return Packed(words, scale.swapaxes(-1, -2), zero.swapaxes(-1, -2))

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
        newer = mx.arange(queries.shape[2] - 1, -1, -1) if causal else None
        axis, shares = _share_out(Share(queries, history, mask, sinks, newer))
        if len(shares) == 1:
            return _attend(shares[0], scale)
        outs = []
        for share, stream in zip(shares, STREAMS, strict=False):
            with mx.stream(stream):
                outs.append(_attend(share, scale))
        return mx.concatenate(outs, axis=axis)

    def restore(self, history: History, *, columns: int, window_start: int | mx.array = 0) -> tuple[mx.array, mx.array]:
        """Return a history as exact numbers; see :meth:`kivi.backends.Backend.restore`.

        Counts in arrays are waited for. Equal to the definition bit for bit on a CPU; on a GPU MLX contracts product and sum,
        which shows with float32 parameters.
        """
        counts = (history.sink_count, history.code_count, window_start, history.window_count)
        numbers = [count for count in counts if isinstance(count, int)]
        if len(numbers) == len(counts):
            return _side_by_side(history, *numbers)
        batch = history.window_keys.shape[0]
        of_rows = zip(*(mx.broadcast_to(mx.array(count), (batch,)).tolist() for count in counts), strict=True)
        rows = [_side_by_side(_cut_history(history, 0, slice(row, row + 1)), *of_row) for row, of_row in enumerate(of_rows)]
        padded = [[_pad_left(part, columns) for part in row] for row in rows]
        return mx.concatenate([keys for keys, _ in padded]), mx.concatenate([values for _, values in padded])


class Share(NamedTuple):
    """What a stream attends to, whole or in part."""

    queries: mx.array
    history: History
    mask: mx.array | None
    sinks: mx.array | None
    newer: mx.array | None  # with a causal mask, how many tokens of the call come after each query's own


def _share_out(whole: Share) -> tuple[int, list[Share]]:
    """Cut the work into independent shares, one a stream; into one on a GPU, or where there is little to do.

    Sequences are shared out, or heads, or the queries of a call: the first of them that makes equal shares. Unpacking, which
    is most of the work, is done anew for each query anyway.

    Returns:
        The axis of the queries that was cut, and the shares.
    """
    queries, history = whole.queries, whole.history
    batch, kv_heads = history.window_keys.shape[:2]
    pieces = (batch, kv_heads, queries.shape[2])
    codes = 0 if history.keys is None else history.keys.words.size * WORD_BITS // history.codecs.keys.bits
    work = codes * (queries.shape[1] // kv_heads) * queries.shape[2]
    wanted = min(len(STREAMS), work // STREAM_CODES) if mx.default_device() == mx.cpu else 1
    if wanted <= 1:
        return 0, [whole]
    axis = next((axis for axis, size in enumerate(pieces) if size % wanted == 0), pieces.index(max(pieces)))
    count = min(wanted, pieces[axis])
    bounds = [index * pieces[axis] // count for index in range(count + 1)]
    return axis, [_share(whole, axis, slice(start, stop)) for start, stop in pairwise(bounds)]


def _share(whole: Share, axis: int, pieces: slice) -> Share:
    queries, history, mask, sinks, newer = whole
    repeats = queries.shape[1] // history.window_keys.shape[1] if axis == 1 else 1
    rows = slice(pieces.start * repeats, pieces.stop * repeats)  # query heads that share KV heads stay together
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mask if mask.shape[axis] == 1 else _cut(mask, axis, rows)
    return Share(
        queries=_cut(queries, axis, rows),
        history=history if axis == 2 else _cut_history(history, axis, pieces),
        mask=mask,
        sinks=sinks[rows] if sinks is not None and axis == 1 else sinks,
        newer=newer[rows] if newer is not None and axis == 2 else newer,
    )


def _cut_history(history: History, axis: int, rows: slice) -> History:
    changes: dict[str, Any] = {}
    for name in ("sink_keys", "sink_values", "window_keys", "window_values"):
        array = getattr(history, name)
        changes[name] = None if array is None else _cut(array, axis, rows)
    for name in ("keys", "values"):
        packed = getattr(history, name)
        changes[name] = None if packed is None else Packed(*(_cut(array, axis, rows) for array in packed))
    for name in ("sink_count", "code_count", "window_count"):
        count = getattr(history, name)
        changes[name] = count if axis == 1 or isinstance(count, int) else count[rows]
    return replace(history, **changes)


def _cut(array: mx.array, axis: int, rows: slice) -> mx.array:
    return array[(slice(None),) * axis + (rows,)]


def _side_by_side(
    history: History, sink_count: int, code_count: int, window_start: int, window_stop: int
) -> tuple[mx.array, mx.array]:
    """Return keys and values of rows that have the same counts."""
    parts = [(history.window_keys[..., window_start:window_stop, :], history.window_values[..., window_start:window_stop, :])]
    if history.keys is not None and history.values is not None and code_count:
        parts.insert(0, _dequantize_codes(history, history.keys, history.values, code_count))
    if history.sink_keys is not None and history.sink_values is not None and sink_count:
        parts.insert(0, (history.sink_keys[..., :sink_count, :], history.sink_values[..., :sink_count, :]))
    return mx.concatenate([keys for keys, _ in parts], axis=-2), mx.concatenate([values for _, values in parts], axis=-2)


def _dequantize_codes(history: History, keys: Packed, values: Packed, count: int) -> tuple[mx.array, mx.array]:
    """Return the first ``count`` tokens of the codes, whole groups, as keys and values."""
    codecs = history.codecs
    keys = Packed(*(part[..., :length] for part, length in zip(keys, codecs.keys.lengths(count), strict=True)))
    values = Packed(*(part[..., :count, :] for part in values))
    exact_keys = _dequantize(keys, codecs.keys, history.window_keys.dtype)
    exact_values = _dequantize(values, codecs.values, history.window_values.dtype)
    return exact_keys.swapaxes(-1, -2), exact_values[..., : history.window_values.shape[-1]]


def _dequantize(packed: Packed, codec: Codec, dtype: mx.Dtype) -> mx.array:
    # float32 parameters make MLX compute in float32, as the definition does; bfloat16 would ruin large zeros.
    scale, zero = packed.scale.astype(mx.float32), packed.zero.astype(mx.float32)
    return mx.dequantize(packed.words, scale, zero, group_size=codec.group_size, bits=codec.bits, dtype=dtype)


def _pad_left(part: mx.array, columns: int) -> mx.array:
    return mx.pad(part, [(0, 0), (0, 0), (columns - part.shape[-2], 0), (0, 0)])


def _attend(share: Share, scale: float) -> mx.array:
    queries, history, mask, sinks, newer = share
    batch, heads, length, _ = queries.shape
    kv_heads = history.window_keys.shape[1]
    # MLX's quantised product on a CPU sums 16-bit numbers in 16 bits, which thousands of tokens overrun, and slowly.
    exact = queries.astype(mx.float32) if mx.default_device() == mx.cpu else queries
    grouped = (exact * scale).reshape(batch, kv_heads, heads // kv_heads * length, -1)
    scores = mx.concatenate(_scores(grouped, history), axis=-1).reshape(batch, heads, length, -1)
    scores = _hide(scores, _seen(history, newer), mask)
    if sinks is not None:
        logits = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (batch, heads, length, 1))
        scores = mx.concatenate([scores, logits], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., :-1]
    out = _weighted_values(weights.reshape(*grouped.shape[:3], -1), history)
    return out.reshape(batch, heads, length, -1).astype(queries.dtype)


def _quantize(grouped: mx.array, codec: Codec) -> tuple[mx.array, mx.array, mx.array]:
    """Quantise groups that lie along the codec's axis; return codes as float32, scales and zeros without that axis.

    The steps of :func:`kivi.quantize.group_quantize` with the same roundings. Codes of a group that is not finite differ,
    as the definition lets them; its parameters do not. ``mx.compile`` would be slower on a CPU, measured at 2.5 times.
    """
    axis, levels, param_dtype = codec.axis, codec.levels, codec.param_dtype
    low, high = mx.min(grouped, axis=axis).astype(mx.float32), mx.max(grouped, axis=axis).astype(mx.float32)
    # Infinities show in minimum and maximum, NaN need not: it depends on the kernel that MLX takes.
    finite = mx.isfinite(low) & mx.isfinite(high) & ~_has_nan(grouped, axis)
    scale = mx.where(finite, (high - low) / levels, mx.nan).astype(param_dtype)
    scale = mx.maximum(scale, mx.array(codec.smallest_scale, param_dtype))
    zero = (low + 0.0).astype(param_dtype)
    exact = grouped.astype(mx.float32) - mx.expand_dims(zero.astype(mx.float32), axis)
    codes = mx.clip(mx.round(exact / mx.expand_dims(scale.astype(mx.float32), axis)), 0, levels)
    return codes, scale, zero


def _has_nan(grouped: mx.array, axis: int) -> mx.array:
    """Return whether a group holds NaN, by its bits: beyond those of infinity, as signed or, if negative, unsigned numbers."""
    signed, unsigned = (mx.int32, mx.uint32) if grouped.dtype == mx.float32 else (mx.int16, mx.uint16)
    positive, negative = (mx.array(sign * mx.inf, grouped.dtype) for sign in (1, -1))
    above = mx.max(grouped.view(signed), axis=axis) > positive.view(signed)
    return above | (mx.max(grouped.view(unsigned), axis=axis) > negative.view(unsigned))


def _join_lanes(codes: mx.array, codec: Codec) -> mx.array:
    """Join neighbouring codes along the codec's axis into lanes of whole bytes: 8 codes of 2 or 3 bits, 4 of 4, or 1 of 8.

    A product with powers of two is the fastest way that MLX has on a CPU, and exact: sums stay below 2**24, and float32, or
    TF32 where MLX uses it, holds every factor.

    Returns:
        uint16; uint8 for 8 bits, and for 3 bits uint32 whose highest byte is empty.
    """
    dtype, size = LANES[codec.bits]
    if size == 1:
        return codes.astype(dtype)
    weights = mx.array([float(1 << code * codec.bits) for code in range(size)])
    if codec.axis == -1:
        return (codes.reshape(*codes.shape[:-1], -1, size) @ weights).astype(dtype)
    *outer, length, dim = codes.shape
    return (weights @ codes.reshape(*outer, length // size, size, dim)).astype(dtype)


def _join_words(lanes: mx.array, codec: Codec) -> mx.array:
    """Return lanes ``[..., N]``, contiguous, as uint32 words, without the empty bytes of :func:`_join_lanes`."""
    if lanes.dtype != mx.uint32:
        return lanes.view(mx.uint32)
    lane_bytes = lanes.view(mx.uint8).reshape(*lanes.shape, lanes.itemsize)[..., : codec.bits]
    return mx.contiguous(lane_bytes.reshape(*lanes.shape[:-1], -1)).view(mx.uint32)


def _scores(queries: mx.array, history: History) -> list[mx.array]:
    """Return ``q K^T`` of each stretch, ``[B, H, rows, capacity]``, in storage order."""
    parts = []
    if history.sink_keys is not None:
        parts.append(queries @ history.sink_keys.swapaxes(-1, -2))
    if history.keys is not None:
        parts.append(_product(queries, history.keys, history.codecs.keys))
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
        part = _product(weights[..., start:window_start], history.values, history.codecs.values)
        out = out + part[..., : out.shape[-1]]  # a ragged last group is padded in storage
    return out


def _product(x: mx.array, packed: Packed, codec: Codec) -> mx.array:
    return mx.quantized_matmul(x, *packed, transpose=False, group_size=codec.group_size, bits=codec.bits)


def _seen(history: History, newer: mx.array | None) -> mx.array | None:
    """Return which columns a query may see by the counts and by causality, ``[B or 1, 1, L or 1, N]``; None if all."""
    stretches = [
        (history.sink_keys, history.sink_count),
        (None if history.values is None else history.values.words, history.code_count),
        (history.window_keys, history.window_count),
    ]
    present = [(array.shape[-2], count) for array, count in stretches if array is not None]
    if newer is None and all(isinstance(count, int) and count == capacity for capacity, count in present):
        return None
    parts = [mx.arange(capacity) < _column(count) for capacity, count in present]
    if newer is not None:
        capacity, count = present[-1]
        parts[-1] = mx.arange(capacity) < _column(count) - newer[:, None]
    rows = max(part.shape[0] for part in parts)
    return mx.concatenate([mx.broadcast_to(part, (rows, 1, parts[-1].shape[-2], part.shape[-1])) for part in parts], axis=-1)


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
