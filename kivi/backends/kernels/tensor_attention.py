"""Decode attention on tensor cores: a body of its own for codes, the portable one for sinks and window.

Both run in one grid, so that the exact tokens, which are few and wait for memory, are attended to beside the codes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import mlx.core as mx

from kivi.backends import History
from kivi.backends.kernels.attention import (
    HISTORY_INPUTS,
    MOST_SPLITS,
    TENSOR_TILE_TOKENS,
    TILE_TOKENS,
    Plan,
    Shapes,
    Split,
    attend,
    cut,
    describe,
    plan_portable,
    prepare,
)
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import Kernel, Setting, Target

MOST_CHANNELS = 128  # a SIMD group's lanes prepare four of a query each, and products tell four chunks of values apart
LEAST_UNITS = 2  # columns of a product that tell queries apart (kernels/packed_product.h); a tile of more queries has more
MOST_PORTABLE_QUERIES = 2  # at a time in the portable body of this grid: with more its registers would limit both
SIMDS = 4  # SIMD groups a threadgroup
# Capacity of codes from which tensor cores are used, by the bits of keys or values, whichever are more: with less, most SIMD
# groups of a threadgroup have no tile, and the portable body is faster. Scales of 8 bits are so small that a float16 loses
# digits of their products with weights.
LEAST_CODES = {2: 2 * TENSOR_TILE_TOKENS, 3: 3 * TENSOR_TILE_TOKENS, 4: 3 * TENSOR_TILE_TOKENS}
DECLARED_BYTES = 8 * 1024  # of shared memory that the portable body declares itself, at most
# The model by which codes are cut, fitted to trials on an H200. Threadgroups share a multiprocessor: n of them take
# n + IDLE / n times one's share of a full one, which is its turns of tiles and BEGINNING more.
MULTIPROCESSORS = 132
IDLE = 0.8
BEGINNING = 0.25

TENSOR = Kernel(
    "attention_tensor",
    ("queries", *HISTORY_INPUTS, "mask", "counts", "factor", "sink_logits", "layout"),
    ("split_out", "split_sums"),
    SIMDS * 32,
    ("lanes.h", "channels.h", "codes.h", "attention.h", "tensor_{prelude}", "packed_product.h"),
    before="attention",
)


class TensorTarget(Target, Protocol):
    """A target with tensor cores.

    Attributes:
        shared_limit: Bytes of memory that a threadgroup may have.
    """

    @property
    def shared_limit(self) -> int: ...


class TensorBackend(KernelBackend):
    """A kernel backend whose attention uses tensor cores where they fit: 16-bit queries and parameters, up to 128 channels.

    Args:
        target: Where the kernels run.
        least_codes: Capacity of codes, in tokens, from which tensor cores are used, by bits; with other bits they are not.
    """

    target: TensorTarget

    def __init__(self, target: TensorTarget, least_codes: Mapping[int, int] = LEAST_CODES) -> None:
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
        call = describe(queries, history, scale=scale, causal=causal, mask=mask, sinks=sinks)
        return attend(plan(self, call.shapes), call, sinks)

    def fits(self, shapes: Shapes) -> bool:
        """Return whether the tensor-core body takes the shapes and dtypes, has enough to do, and room in shared memory.

        It rounds folded scales and weights to float16, which float32 queries would see. It copies whole tiles, aligned, which
        the capacities of a cache (:data:`kivi.cache.storage.CODE_STEP`) allow.
        """
        if not shapes.code_room or shapes.dtype == mx.float32 or set(shapes.params) != {mx.float16}:
            return False
        least = self.least_codes.get(max(codec.bits for codec in shapes.codecs))
        if least is None or shapes.code_room < least or shapes.code_room % TENSOR_TILE_TOKENS or shapes.key_channels % 16:
            return False
        if max(shapes.key_channels, shapes.value_padded) > MOST_CHANNELS:
            return False
        return _shared_bytes(shapes) + DECLARED_BYTES <= self.target.shared_limit


@lru_cache(maxsize=1024)
def plan(backend: TensorBackend, shapes: Shapes) -> Plan:
    """Prepare the body that the shapes are for."""
    if not backend.fits(shapes):
        return plan_portable(backend.target, shapes)
    coded = _cut(shapes)
    left = sum(-(-room // TILE_TOKENS) for room in (shapes.sink_room, shapes.window_room))
    rest = cut(shapes, left).splits
    parts = max(coded.query_tile // MOST_PORTABLE_QUERIES, 1)
    settings: dict[str, Setting] = {
        "PARAM": mx.float16,
        "SIMDS": SIMDS,
        "TENSOR_QUERIES": coded.query_tile,
        "TENSOR_UNITS": max(coded.query_tile, LEAST_UNITS),
        "SHARED_BYTES": _shared_bytes(shapes),
        "SKIPS": 1,
    }
    return prepare(backend.target, TENSOR, shapes, coded._replace(splits=rest + coded.splits), rest, settings, parts)


def _cut(shapes: Shapes) -> Split:
    """Cut the codes into as many splits as are soonest done, where a multiprocessor's threadgroups share it.

    By capacity, never by counts, which may be on the GPU only.
    """
    tiles = -(-shapes.code_room // TENSOR_TILE_TOKENS)

    def time(splits: int) -> float:
        turns = -(-tiles // (splits * SIMDS))
        groups = -(-shapes.batch * shapes.heads * shapes.query_tiles * splits // MULTIPROCESSORS)
        return (groups + IDLE / groups) * (turns + BEGINNING)

    splits = min(range(1, min(-(-tiles // SIMDS), MOST_SPLITS) + 1), key=time)
    return Split(shapes.query_tile, shapes.query_tiles, splits, lone=False)


def _shared_bytes(shapes: Shapes) -> int:
    """Return the bytes of shared memory of a threadgroup, whose SIMD groups each hold half a tile and what comes of it."""
    half = TENSOR_TILE_TOKENS // 2
    keys, values = shapes.codecs
    codes = keys.code_bytes(half, shapes.key_channels) + values.code_bytes(half, shapes.value_channels)
    params = keys.param_bytes(TENSOR_TILE_TOKENS, shapes.key_channels) + values.param_bytes(half, shapes.value_channels)
    of_query = 4 * (half // 32 * 36 + 4 + half // 2 + 8)  # scores, what zeros add to them, weights
    prepared = 4 * (shapes.key_channels // 2 + 8 + 4)
    return SIMDS * (codes + params + shapes.query_tile * of_query) + shapes.query_tile * prepared
