"""Histories to attend to, and reference attention in float32 on the dequantised history."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kivi.backends import ATTENTION_BOUND, History
from kivi.cache.storage import CODE_STEP
from kivi.codec import Codecs, Packed
from kivi.quantize import group_dequantize, group_quantize, pack, padded_length

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)


UNIT_ROUNDOFF = {mx.float32: 2**-24, mx.float16: 2**-11, mx.bfloat16: 2**-8}  # largest relative error of a rounding


@dataclass(frozen=True)
class Case:
    """Shapes and counts of one history; ``spare`` groups of capacity, or more, hold junk that must not be seen.

    From a tile of the tensor cores on, capacity is a multiple of ``CODE_STEP``, as a cache's always is.
    """

    batch: int = 1
    heads: int = 2
    queries_a_head: int = 1
    length: int = 1
    key_channels: int = 64
    value_channels: int = 64
    key_bits: int = 2
    value_bits: int = 2
    group_size: int = 32
    params: mx.Dtype = mx.float16
    dtype: mx.Dtype = mx.float16
    sinks: int = 0
    codes: int = 160
    window: int = 40
    spare: int = 1

    @property
    def capacity(self) -> int:
        """Tokens that there is room for as codes."""
        room = self.codes + self.spare * self.group_size
        return room if room < CODE_STEP else padded_length(room, CODE_STEP)


@dataclass(frozen=True)
class Exact:
    """The same history, dequantised: keys and values ``[B, H, N, D]`` float32, and which columns hold tokens."""

    keys: mx.array
    values: mx.array
    present: np.ndarray  # [B, N]
    window_ends: list[int]  # column after each row's last token


def build(case: Case, seed: int = 0, counts: list[tuple[int, int, int]] | None = None) -> tuple[mx.array, History, Exact]:
    """Return queries, history and its exact twin; ``counts`` (sinks, codes, window) a row make counts arrays."""
    mx.random.seed(seed)
    room = (case.sinks, case.capacity, case.window + 5)
    keys = [_random(case, tokens, case.key_channels) for tokens in room]
    values = [_random(case, tokens, case.value_channels) for tokens in room]
    key_codes, exact_keys = _quantize(keys[1], -2, case.key_bits, case)
    value_codes, exact_values = _quantize(values[1], -1, case.value_bits, case)
    rows = counts or [(case.sinks, case.codes, case.window)] * case.batch
    columns = [mx.array(column, mx.int32) if counts else column[0] for column in zip(*rows, strict=True)]
    codecs = Codecs.of(key_bits=case.key_bits, value_bits=case.value_bits, group_size=case.group_size, param_dtype=case.params)
    history = History(
        codecs=codecs,
        sink_keys=keys[0] if case.sinks else None,
        sink_values=values[0] if case.sinks else None,
        keys=key_codes,
        values=value_codes,
        window_keys=keys[2],
        window_values=values[2],
        sink_count=columns[0],
        code_count=columns[1],
        window_count=columns[2],
    )
    starts = [0, room[0], room[0] + room[1]]
    present = np.zeros((case.batch, sum(room)), bool)
    for row, row_counts in enumerate(rows):
        for start, count in zip(starts, row_counts, strict=True):
            present[row, start : start + count] = True
    exact = Exact(
        keys=mx.concatenate([keys[0].astype(mx.float32), exact_keys, keys[2].astype(mx.float32)], axis=2),
        values=mx.concatenate([values[0].astype(mx.float32), exact_values, values[2].astype(mx.float32)], axis=2),
        present=present,
        window_ends=[starts[2] + row[2] for row in rows],
    )
    shape = (case.batch, case.heads * case.queries_a_head, case.length, case.key_channels)
    return mx.random.normal(shape).astype(case.dtype), history, exact


def reference(
    queries: mx.array, exact: Exact, scale: float, causal: bool, mask: mx.array | None = None, sinks: mx.array | None = None
) -> mx.array:
    """Return attention in float32, as ``Backend.decode_attention`` words it."""
    batch, heads, length, _ = queries.shape
    repeats = heads // exact.keys.shape[1]
    keys, values = mx.repeat(exact.keys, repeats, axis=1), mx.repeat(exact.values, repeats, axis=1)
    scores = queries.astype(mx.float32) * scale @ keys.swapaxes(-1, -2)
    seen = np.repeat(exact.present[:, None, :], length, axis=1)
    for row, end in enumerate(exact.window_ends):
        for position in range(length if causal else 0):
            seen[row, position, end - (length - 1 - position) : end] = False
    scores = mx.where(mx.array(seen)[:, None], scores, -mx.inf)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        logits = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (batch, heads, length, 1))
        return mx.softmax(mx.concatenate([scores, logits], axis=-1), axis=-1)[..., :-1] @ values
    return mx.softmax(scores, axis=-1) @ values


def _random(case: Case, tokens: int, channels: int) -> mx.array:
    return mx.random.normal((case.batch, case.heads, tokens, channels)).astype(case.dtype)


def _quantize(x: mx.array, axis: int, bits: int, case: Case) -> tuple[Packed, mx.array]:
    quantized = group_quantize(x, bits=bits, group_size=case.group_size, axis=axis, param_dtype=case.params)
    exact = group_dequantize(quantized, group_size=case.group_size, axis=axis, dtype=mx.float32, length=x.shape[axis])
    arrays = [array.swapaxes(-1, -2) if axis == -2 else array for array in quantized]
    return Packed(pack(arrays[0], bits), mx.contiguous(arrays[1]), mx.contiguous(arrays[2])), exact


def attention_bound(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> float:
    """Return the largest difference of an output of attention on codes from exact attention, whatever the numbers are.

    With ``u`` the roundoff of the coarsest dtype, a query and a key that are rounded once each change a score by at most
    ``d = 2 u scale sum(|q| |k|)``. Softmax then changes each weight by a factor between ``exp(-2 d)`` and ``exp(2 d)``,
    and so an output by at most ``expm1(2 d) max(|v|)``. Rounding values and outputs adds ``2 u max(|v|)``, sums in float32
    the rest.

    Args:
        queries: ``[B, H_q, L, D_k]``.
        keys: The dequantised history ``[B, H, N, D_k]``, in the dtype that it is restored to.
        values: As ``keys``, ``[B, H, N, D_v]``.
        scale: Factor of the scores.
    """
    roundoff = max(UNIT_ROUNDOFF[array.dtype] for array in (queries, keys, values))
    asked, known, summed = (np.abs(np.array(array.astype(mx.float32))) for array in (queries, keys, values))
    known = np.repeat(known, asked.shape[1] // known.shape[1], axis=1)
    moved = 2 * roundoff * scale * float(np.max(asked @ known.swapaxes(-1, -2)))
    return (math.expm1(2 * moved) + 2 * roundoff + ATTENTION_BOUND[mx.float32]) * float(np.max(summed))
