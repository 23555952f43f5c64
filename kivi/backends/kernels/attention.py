"""Launches of the attention kernels: a grid over heads and splits of the tokens, then a merge of the splits."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, cast

import mlx.core as mx

from kivi.backends import BackendError, History
from kivi.backends.kernels.program import (
    SHARED_LIMIT,
    SIMD_WIDTH,
    Kernel,
    Prepared,
    Setting,
    Target,
    constant,
)
from kivi.backends.kernels.settings import history_settings, run_codes
from kivi.codec import Codecs, Packed

TILE_TOKENS = 128  # tokens that a threadgroup takes at a time
TENSOR_TILE_TOKENS = 256  # tokens that a SIMD group takes at a time in the tensor-core body
RUN = 8  # channels of an exact token that a lane takes
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
    ("queries", *HISTORY_INPUTS, "mask", "counts", "factor", "sink_logits", "layout"),
    ("split_out", "split_sums"),
    THREADS,
    ("lanes.h", "channels.h", "codes.h", "attention.h"),
)
# Few rows have many splits each, and a GPU to themselves: more SIMD groups then have more loads under way.
FEW_ROWS = 256
MERGE, MERGE_FEW = (
    Kernel(
        *("attention_merge", ("split_out", "split_sums", "sink_logits", "layout"), ("out",)),
        threads,
        ("lanes.h", "attention.h"),
    )
    for threads in (128, 1024)
)


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


class Shapes(NamedTuple):
    """All that a launch depends on but the arrays themselves; counts of tokens are not part of it.

    ``params`` are the dtypes of the parameters of keys and of values, ``exact`` those of exact keys and values.
    """

    batch: int
    query_heads: int
    length: int
    heads: int
    key_channels: int
    value_channels: int
    dtype: mx.Dtype
    params: tuple[mx.Dtype, mx.Dtype]
    exact: tuple[mx.Dtype, mx.Dtype]
    codecs: Codecs
    sink_room: int
    code_room: int
    window_room: int
    causal: bool
    mask_strides: tuple[int, int, int, int] | None
    count_stride: int
    sink_logits: bool

    @property
    def rows(self) -> int:
        """Queries of one KV head."""
        return self.query_heads // self.heads * self.length

    @property
    def query_tile(self) -> int:
        """Queries of a KV head that a threadgroup takes."""
        return next((tile for tile in QUERY_TILES if tile >= self.rows), QUERY_TILES[-1])

    @property
    def query_tiles(self) -> int:
        return -(-self.rows // self.query_tile)

    @property
    def value_padded(self) -> int:
        return self.codecs.values.padded(self.value_channels)


class Call(NamedTuple):
    """One call of attention: its shapes, and its arrays in the kernels' order up to ``factor``."""

    shapes: Shapes
    arrays: list[mx.array]


class Split(NamedTuple):
    """How attention's work is cut: queries a threadgroup, tiles of queries, splits of the tokens.

    ``lone``: there are as many rows as fill a GPU, so that tokens are never split, however many there are.
    """

    query_tile: int
    query_tiles: int
    splits: int
    lone: bool


class Plan(NamedTuple):
    """Attention for one kind of call, prepared: the launch over heads and splits, and the merge of splits if there are some.

    ``layout`` and ``no_logits`` are arrays that both read.
    """

    parts: Prepared
    merge: Prepared | None
    layout: mx.array
    no_logits: mx.array


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
    call = describe(queries, history, scale=scale, causal=causal, mask=mask, sinks=sinks)
    return attend(plan_portable(target, call.shapes), call, sinks)


def attend(plan: Plan, call: Call, sinks: mx.array | None) -> mx.array:
    """Attend over heads, tiles of queries and splits, and merge the splits into ``[B, H_q, L, D_v]``."""
    logits = plan.no_logits if sinks is None else sinks.astype(mx.float32)
    parts = plan.parts([*call.arrays, logits, plan.layout])
    if plan.merge is None:
        return parts[0]
    return plan.merge([*parts, logits, plan.layout])[0]


def describe(
    queries: mx.array, history: History, *, scale: float, causal: bool, mask: mx.array | None, sinks: mx.array | None
) -> Call:
    """Return the shapes and buffers of a call."""
    batch, query_heads, length, key_channels = queries.shape
    _, heads, window_room, value_channels = history.window_values.shape
    arrays = history_arrays(history)
    counts, count_stride = stack_counts((history.code_count, history.sink_count, history.window_count), batch)
    mask_array, mask_strides = _mask(mask)
    shapes = Shapes(  # by position, which takes half the time: it is made in every layer of every step
        batch,
        query_heads,
        length,
        heads,
        key_channels,
        value_channels,
        queries.dtype,
        (arrays[1].dtype, arrays[4].dtype),
        (arrays[8].dtype, arrays[9].dtype),
        history.codecs,
        0 if history.sink_keys is None else history.sink_keys.shape[2],
        0 if history.values is None else history.values.words.shape[2],
        window_room,
        causal,
        mask_strides,
        count_stride,
        sinks is not None,
    )
    return Call(shapes, [queries, *arrays, mask_array, counts, constant((scale * LOG2_E,), mx.float32)])


@lru_cache(maxsize=1024)
def plan_portable(target: Target, shapes: Shapes) -> Plan:
    """Prepare the portable body; raises as :func:`prepare` does."""
    tiles = sum(-(-room // TILE_TOKENS) for room in (shapes.sink_room, shapes.code_room, shapes.window_room))
    split = cut(shapes, tiles)
    return prepare(target, ATTENTION, shapes, split, split.splits, {"SKIPS": 0}, parts=1)


def cut(shapes: Shapes, tiles: int) -> Split:
    """Cut the work into about WANTED_GROUPS threadgroups.

    By shapes and capacities, never by counts, which may be on the GPU only; ``tiles`` are those that the capacity has.
    """
    most = max(WANTED_GROUPS // (shapes.batch * shapes.heads * shapes.query_tiles), 1)
    return Split(shapes.query_tile, shapes.query_tiles, splits=min(most, max(tiles, 1), MOST_SPLITS), lone=most == 1)


def prepare(
    target: Target,
    kernel: Kernel,
    shapes: Shapes,
    split: Split,
    tensor_from: int,
    settings: dict[str, Setting],
    parts: int,
) -> Plan:
    """Return the launches of ``kernel`` for a split of which those from ``tensor_from`` on are the tensor-core body's.

    The portable body takes a tile of queries in ``parts``.

    Raises:
        BackendError: the query heads are no multiple of the KV heads, or a token's values take more threads than there are.
    """
    codecs = shapes.codecs
    if shapes.query_heads % shapes.heads:
        raise BackendError(f"{shapes.query_heads} query heads on {shapes.heads} KV heads: expected a multiple")
    widest = THREADS * run_codes(codecs.values)
    if shapes.value_padded > widest:
        raise BackendError(
            f"{shapes.value_channels} channels of values in {codecs.values.bits} bits: expected at most {widest}"
        )
    value_columns = shapes.value_padded // run_codes(codecs.values)
    key_lanes = next(lanes for lanes in (8, 16, 32) if lanes * RUN >= shapes.key_channels or lanes == SIMD_WIDTH)
    layout = Layout(
        *(shapes.rows, shapes.length, shapes.heads, split.splits),
        *(shapes.code_room, shapes.sink_room, shapes.window_room, int(shapes.causal)),
        *(shapes.mask_strides or (0, 0, 0, 0)),
        *(shapes.count_stride, tensor_from),
    )
    attention: dict[str, Setting] = {
        **history_settings(codecs, shapes.key_channels, shapes.value_channels),
        "KEY_COLUMNS": TILE_TOKENS // run_codes(codecs.keys),
        "VALUE_COLUMNS": value_columns,
        "VALUE_SLICES": max(THREADS // value_columns, 1),
        "KEY_LANES": key_lanes,
        "KEY_STRIDES": -(-shapes.key_channels // (key_lanes * RUN)),
        "MASKED": int(shapes.mask_strides is not None),
        "QUERY_TILE": split.query_tile // parts,
        "QUERY_PARTS": parts,
        "LONE_SPLIT": int(split.lone),
        "OUT_ELEMENT": shapes.dtype if split.lone else mx.float32,
        "SINK_LOGITS": int(shapes.sink_logits),
    }
    out = ((shapes.batch, shapes.query_heads, shapes.length, shapes.value_channels), shapes.dtype)
    rows = shapes.batch * shapes.query_heads * shapes.length
    merger = _merge(rows, shapes.value_channels)
    merging: dict[str, Setting] = {
        "ELEMENT": shapes.dtype,
        "VALUE_CHANNELS": shapes.value_channels,
        "SINK_LOGITS": int(shapes.sink_logits),
        "SIMDS": merger.threads // SIMD_WIDTH,
    }
    split_out = ((rows, split.splits, shapes.value_channels), mx.float32)
    return Plan(
        parts=Prepared(
            target,
            kernel,
            tuple((attention | settings).items()),
            groups=(split.splits + tensor_from * (parts - 1), split.query_tiles, shapes.batch * shapes.heads),
            outputs=(out if split.lone else split_out, ((rows, split.splits, 2), mx.float32)),
        ),
        merge=None if split.lone else Prepared(target, merger, tuple(merging.items()), groups=(rows, 1, 1), outputs=(out,)),
        layout=constant(layout, mx.int32),
        no_logits=constant((0.0,), mx.float32),
    )


def _merge(rows: int, channels: int) -> Kernel:
    shared = MERGE_FEW.threads // SIMD_WIDTH * channels * mx.float32.size
    return MERGE_FEW if rows <= FEW_ROWS and shared <= SHARED_LIMIT else MERGE


def history_arrays(history: History) -> list[mx.array]:
    """Return the buffers of HISTORY_INPUTS; what is not there becomes a small array that no kernel reads."""
    window_keys, window_values = history.window_keys, history.window_values
    sink_keys = history.sink_keys if history.sink_keys is not None else _nothing(window_keys.dtype)
    sink_values = history.sink_values if history.sink_values is not None else _nothing(window_values.dtype)
    return [
        *(history.keys or _no_codes()),
        *(history.values or _no_codes()),
        sink_keys,
        sink_values,
        window_keys,
        window_values,
    ]


def stack_counts(counts: tuple[int | mx.array, ...], batch: int) -> tuple[mx.array, int]:
    """Return ``n`` counts as int32 ``[n]``, or ``[B, n]`` where rows differ, and the stride of a row."""
    if mx.array not in map(type, counts):
        return constant(cast("tuple[int, ...]", counts), mx.int32), 0
    columns = [mx.broadcast_to(mx.array(count, mx.int32), (batch,)) for count in counts]
    return mx.stack(columns, axis=-1), len(counts)


def _nothing(dtype: mx.Dtype) -> mx.array:
    return constant((0,), dtype)


def _no_codes() -> Packed:
    return Packed(_nothing(mx.uint32), _nothing(mx.float16), _nothing(mx.float16))


def _mask(mask: mx.array | None) -> tuple[mx.array, tuple[int, int, int, int] | None]:
    """Return the mask as additive float32 and its strides, 0 along axes that it broadcasts over."""
    if mask is None:
        return constant((0.0,), mx.float32), None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    additive = mx.where(mask, 0.0, -mx.inf) if mask.dtype == mx.bool_ else mask
    shape = additive.shape
    batch, head, query, token = (math.prod(shape[axis + 1 :]) if shape[axis] > 1 else 0 for axis in range(4))
    return additive.astype(mx.float32), (batch, head, query, token)
