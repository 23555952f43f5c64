"""Decode attention on tensor cores: a body of its own for whole tiles of codes, the portable one for the rest.

Both run in one grid, so that the rest, which is short and waits for memory, runs beside the codes."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kivi.backends import History, kernel_attention
from kivi.backends.kernel import Kernel, Setting, Target
from kivi.backends.kernel_attention import (
    HISTORY_INPUTS,
    TENSOR_TILE_TOKENS,
    TILE_TOKENS,
    Plan,
    Shapes,
    attend,
    configure,
    cut,
    describe,
)
from kivi.backends.kernel_backend import KernelBackend
from kivi.quantize import padded_length

MOST_CHANNELS = 128  # a row of words is held in registers
QUERY_TILES = (1, 2, 4)
KEY_UNITS = {1: 1, 2: 1, 4: 4}  # by the queries of a tile: those that share a product of keys
MOST_PORTABLE_QUERIES = 1  # at a time in the portable body of this grid: with more its registers would limit both
MANTISSA_BITS = 10  # of float16: codes within them need no shift
SIMDS = 4  # SIMD groups a threadgroup
LEAST_CODES = 3 * TENSOR_TILE_TOKENS  # with fewer, most SIMD groups of a threadgroup would have no tile
WANTED_GROUPS = 4096  # threadgroups of work at most: a few waves, so that none waits long for the last

TENSOR = Kernel(
    "attention_tensor",
    ("queries", *HISTORY_INPUTS, "mask", "counts", "factor", "sink_logits", "layout"),
    ("split_out", "split_sums"),
    SIMDS * 32,
    ("lanes.h", "channels.h", "attention.h", "tensor_{prelude}"),
    before="attention",
)


class TensorBackend(KernelBackend):
    """A kernel backend whose attention uses tensor cores where they fit: 16-bit queries and parameters, up to 128 channels.

    Args:
        target: Where the kernels run.
        least_codes: Capacity of codes, in tokens, from which tensor cores are used.
    """

    def __init__(self, target: Target, least_codes: int = LEAST_CODES) -> None:
        super().__init__(target)
        self.least_codes = least_codes

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
        attention = decode_attention if fits(queries, history, self.least_codes) else kernel_attention.decode_attention
        return attention(self.target, queries, history, scale=scale, causal=causal, mask=mask, sinks=sinks)


def fits(queries: mx.array, history: History, least_codes: int) -> bool:
    """Return whether the tensor-core body takes the shapes and dtypes, and has enough to do.

    It rounds folded scales and weights to float16, which float32 queries would see.
    """
    if history.keys is None or history.keys.scale.dtype != mx.float16 or queries.dtype == mx.float32:
        return False
    key_channels, value_channels = queries.shape[-1], padded_length(history.window_values.shape[-1], history.group_size)
    room = history.keys.scale.shape[-1] * history.group_size
    return key_channels % 16 == 0 and max(key_channels, value_channels) <= MOST_CHANNELS and room >= least_codes


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
    """Attend on codes; see :meth:`kivi.backends.Backend.decode_attention`."""
    call = describe(queries, history, scale=scale, causal=causal, mask=mask, sinks=sinks)
    return attend(target, TENSOR, call, _plan(call.shapes), sinks)


@lru_cache(maxsize=1024)
def _plan(shapes: Shapes) -> Plan:
    coded = cut(shapes, -(-shapes.code_room // (TENSOR_TILE_TOKENS * SIMDS)), QUERY_TILES, WANTED_GROUPS)
    # Fewer than a tile of codes are left to the portable body, in two of its tiles at most.
    left = TENSOR_TILE_TOKENS // TILE_TOKENS + sum(-(-room // TILE_TOKENS) for room in (shapes.sink_room, shapes.window_room))
    rest = cut(shapes, left, QUERY_TILES, kernel_attention.WANTED_GROUPS).splits
    parts = max(coded.query_tile // MOST_PORTABLE_QUERIES, 1)
    units = KEY_UNITS[coded.query_tile]
    phases = max(units // shapes.key_bits, 1)
    row_words = max(shapes.key_bits // units, 1)
    settings: dict[str, Setting] = {
        "PARAM": mx.float16,
        "SIMDS": SIMDS,
        "TENSOR_QUERIES": coded.query_tile,
        "KEY_UNITS": units,
        "KEY_REPEATS": coded.query_tile // units,
        "KEY_PHASES": phases,
        "KEY_ROW_WORDS": row_words,
        "KEY_LOAD": min(row_words, 2),
        "KEY_SHIFTS": 16 // shapes.key_bits // phases,
        "KEY_DIRECT": MANTISSA_BITS // shapes.key_bits,
        "VALUE_DIRECT": MANTISSA_BITS // shapes.value_bits,
        "VALUE_TILES": -(-coded.query_tile // 2),  # two queries share a matrix's columns
        "SKIPS": 1,
    }
    return configure(shapes, coded._replace(splits=rest + coded.splits, lone=False), rest, settings, parts)
