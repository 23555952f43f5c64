"""Launches of the attention kernels: a grid over heads and splits of the tokens, then a merge of the splits."""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from kivi.backends import BackendError, History, Packed
from kivi.backends.kernel import SIMD_WIDTH, Kernel, Setting, Target, constant, launch
from kivi.quantize import padded_length

TILE_TOKENS = 128  # tokens that a threadgroup takes at a time
TENSOR_TILE_TOKENS = 256  # tokens that a SIMD group takes at a time in the tensor-core body
THREADS = 128
QUERY_TILES = (1, 2, 4)  # queries that a threadgroup may take; more would not leave registers for a tile's codes
WANTED_GROUPS = 512  # threadgroups that fill a large GPU; fewer heads get more splits
MOST_SPLITS = 256
LOG2_E = math.log2(math.e)

HISTORY_INPUTS = (
    *("key_words", "key_scale", "key_zero", "value_words", "value_scale", "value_zero"),
    *("sink_keys", "sink_values", "window_keys", "window_values"),
)
ATTENTION = Kernel(
    "attention",
    ("queries", *HISTORY_INPUTS, "mask", "counts", "layout", "factor"),
    ("split_out", "split_sums"),
    THREADS,
    ("lanes.h", "attention.h"),
)
MERGE = Kernel(
    "attention_merge",
    ("split_out", "split_sums", "sink_logits", "layout"),
    ("out",),
    256,
    ("lanes.h", "attention.h"),
)


class Split(NamedTuple):
    """How attention's work is cut: queries a threadgroup, tiles of queries, splits of the tokens."""

    query_tile: int
    query_tiles: int
    splits: int


class Layout(NamedTuple):
    """What the kernels read from the layout array, in its order (kernels/attention.h)."""

    query_rows: int
    queries: int
    kv_heads: int
    splits: int
    code_capacity: int
    sink_capacity: int
    window_capacity: int
    causal: int
    mask_batch: int
    mask_head: int
    mask_query: int
    mask_token: int
    count_stride: int
    tensor_from: int


class Call(NamedTuple):
    """One call of attention, its arrays in the kernels' order."""

    settings: dict[str, Setting]
    arrays: list[mx.array]  # queries, the history, mask, counts
    layout: Layout  # the splits are filled in at launch
    factor: mx.array


def decode_attention(
    target: Target,
    queries: mx.array,
    history: History,
    *,
    scale: float,
    causal: bool,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend on codes; see :meth:`kivi.backends.Backend.decode_attention`. A query that sees nothing gets zeros."""
    call = describe(queries, history, scale=scale, causal=causal, mask=mask)
    split = plan(queries, history, sum(-(-tokens // TILE_TOKENS) for tokens in capacities(history)))
    layout = call.layout._replace(splits=split.splits, tensor_from=split.splits)
    return attend(target, ATTENTION, call._replace(layout=layout), queries, history, split, {"SKIPS": 0}, sinks)


def attend(
    target: Target,
    kernel: Kernel,
    call: Call,
    queries: mx.array,
    history: History,
    split: Split,
    settings: dict[str, Setting],
    sinks: mx.array | None,
) -> mx.array:
    """Run ``kernel`` over heads, tiles of queries and splits, and merge the splits into ``[B, H_q, L, D_v]``."""
    batch, heads = history.window_keys.shape[:2]
    rows, splits = math.prod(queries.shape[:3]), split.splits
    channels = history.window_values.shape[-1]
    layout = constant(call.layout, mx.int32)
    parts = launch(
        target,
        kernel,
        call.settings | settings | {"QUERY_TILE": split.query_tile},
        [*call.arrays, layout, call.factor],
        groups=(splits, split.query_tiles, batch * heads),
        outputs=[((rows, splits, channels), mx.float32), ((rows, splits, 2), mx.float32)],
    )
    merging: dict[str, Setting] = {
        "ELEMENT": queries.dtype,
        "VALUE_CHANNELS": channels,
        "SINK_LOGITS": int(sinks is not None),
        "SIMDS": MERGE.threads // SIMD_WIDTH,
    }
    logits = constant((0.0,), mx.float32) if sinks is None else sinks.astype(mx.float32)
    outputs = [((*queries.shape[:3], channels), queries.dtype)]
    (out,) = launch(target, MERGE, merging, [*parts, logits, layout], groups=(rows, 1, 1), outputs=outputs)
    return out


def plan(
    queries: mx.array,
    history: History,
    tiles: int,
    query_tiles: tuple[int, ...] = QUERY_TILES,
    wanted: int = WANTED_GROUPS,
) -> Split:
    """Cut the work by shapes and capacities, never by counts, which may be on the GPU only.

    ``tiles`` are those that the tokens' capacity has; no more splits are made.
    """
    batch, heads = history.window_keys.shape[:2]
    rows = queries.shape[1] // heads * queries.shape[2]
    query_tile = next((tile for tile in query_tiles if tile >= rows), query_tiles[-1])
    tiles_of_queries = -(-rows // query_tile)
    splits = min(max(wanted // (batch * heads * tiles_of_queries), 1), max(tiles, 1), MOST_SPLITS)
    return Split(query_tile, tiles_of_queries, splits)


def capacities(history: History) -> tuple[int, int, int]:
    """Return the tokens that sinks, codes and window have room for: the mask's columns, in order."""
    codes = 0 if history.values is None else history.values.words.shape[2]
    sinks = 0 if history.sink_keys is None else history.sink_keys.shape[2]
    return sinks, codes, history.window_keys.shape[2]


def describe(queries: mx.array, history: History, *, scale: float, causal: bool, mask: mx.array | None) -> Call:
    """Return the configuration, buffers and layout of a call.

    Raises:
        BackendError: the query heads are no multiple of the KV heads.
    """
    query_heads, length = queries.shape[1:3]
    heads = history.window_keys.shape[1]
    if query_heads % heads:
        raise BackendError(f"{query_heads} query heads on {heads} KV heads: expected a multiple")
    sink_room, code_room, window_room = capacities(history)
    counts, stride = _counts(history, queries.shape[0])
    mask_array, mask_strides = _mask(mask)
    rows = query_heads // heads * length
    layout = Layout(rows, length, heads, 0, code_room, sink_room, window_room, int(causal), *mask_strides, stride, 0)
    arrays = [queries, *_codes(history.keys), *_codes(history.values)]
    arrays += [_or_nothing(history.sink_keys, queries.dtype), _or_nothing(history.sink_values, queries.dtype)]
    arrays += [history.window_keys, history.window_values, mask_array, counts]
    factor = constant((scale * LOG2_E,), mx.float32)
    return Call(_settings(history, mask), arrays, layout, factor)


def _settings(history: History, mask: mx.array | None) -> dict[str, Setting]:
    value_channels = history.window_values.shape[-1]
    padded = padded_length(value_channels, history.group_size)
    value_columns = padded * history.value_bits // 32
    return {
        "KEY_BITS": history.key_bits,
        "VALUE_BITS": history.value_bits,
        "GROUP": history.group_size,
        "KEY_CHANNELS": history.window_keys.shape[-1],
        "VALUE_CHANNELS": value_channels,
        "VALUE_PADDED": padded,
        "KEY_CODES": 32 // history.key_bits,
        "VALUE_CODES": 32 // history.value_bits,
        "KEY_COLUMNS": TILE_TOKENS * history.key_bits // 32,
        "VALUE_COLUMNS": value_columns,
        "VALUE_SLICES": max(THREADS // value_columns, 1),
        "EXACT_COLUMNS": -(-padded // THREADS),
        "MASKED": int(mask is not None),
        "SKIPPED_TILE": TENSOR_TILE_TOKENS,
    }


def _or_nothing(array: mx.array | None, dtype: mx.Dtype) -> mx.array:
    return constant((0,), dtype) if array is None else array


def _codes(packed: Packed | None) -> tuple[mx.array, mx.array, mx.array]:
    if packed is not None:
        return packed
    return _or_nothing(None, mx.uint32), _or_nothing(None, mx.float16), _or_nothing(None, mx.float16)


def _counts(history: History, batch: int) -> tuple[mx.array, int]:
    """Return counts of codes, sinks and window, as ``[3]`` or ``[B, 3]``, and the stride of a row."""
    counts = (history.code_count, history.sink_count, history.window_count)
    numbers = tuple(count for count in counts if isinstance(count, int))
    if len(numbers) == len(counts):
        return constant(numbers, mx.int32), 0
    columns = [mx.broadcast_to(mx.array(count, mx.int32), (batch,)) for count in counts]
    return mx.stack(columns, axis=-1), 3


def _mask(mask: mx.array | None) -> tuple[mx.array, tuple[int, int, int, int]]:
    """Return the mask as additive float32 and its strides, 0 along axes that it broadcasts over."""
    if mask is None:
        return constant((0.0,), mx.float32), (0, 0, 0, 0)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    additive = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    shape = additive.shape
    batch, head, query, token = (math.prod(shape[axis + 1 :]) if shape[axis] > 1 else 0 for axis in range(4))
    return additive.astype(mx.float32), (batch, head, query, token)
