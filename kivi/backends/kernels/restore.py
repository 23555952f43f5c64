"""The launch that restores a history as exact keys and values, for prefill."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from kivi.backends import History
from kivi.backends.kernels.attention import HISTORY_INPUTS, history_arrays, stack_counts
from kivi.backends.kernels.program import Kernel, Prepared, Setting, Target, constant
from kivi.backends.kernels.settings import history_settings

TILE_TOKENS = 128  # tokens that a threadgroup takes
RUN = 8  # channels that a thread takes

RESTORE = Kernel(
    "restore", (*HISTORY_INPUTS, "counts", "layout"), ("keys", "values"), 128, ("channels.h", "codes.h", "restore.h")
)


class Layout(NamedTuple):
    """What the kernel reads from the layout array, in its order."""

    columns: int
    code_capacity: int
    sink_capacity: int
    window_capacity: int
    sinks_from: int
    window_from: int
    blank_from: int
    kv_heads: int
    count_stride: int


def restore(target: Target, history: History, *, columns: int, window_start: int | mx.array) -> tuple[mx.array, mx.array]:
    """Return exact keys and values in one pass; see :meth:`kivi.backends.Backend.restore`."""
    batch, heads, window_room, value_channels = history.window_values.shape
    key_channels = history.window_keys.shape[-1]
    code_room = 0 if history.values is None else history.values.words.shape[2]
    sink_room = 0 if history.sink_keys is None else history.sink_keys.shape[2]
    counts, stride = stack_counts((history.code_count, history.sink_count, window_start, history.window_count), batch)
    # By capacities: counts may be on the GPU only. Rows that share their counts begin in the first column.
    code_tiles, sink_tiles, window_tiles, blank_tiles = (
        -(-room // TILE_TOKENS) for room in (code_room, sink_room, window_room, columns if stride else 0)
    )
    blank_from = code_tiles + sink_tiles + window_tiles
    layout = Layout(
        *(columns, code_room, sink_room, window_room),
        *(code_tiles, code_tiles + sink_tiles, blank_from),
        *(heads, stride),
    )
    settings: dict[str, Setting] = {
        "KEY_ELEMENT": history.window_keys.dtype,
        "VALUE_ELEMENT": history.window_values.dtype,
        **history_settings(history.codecs, key_channels, value_channels),
        "KEY_BLOCKS": -(-key_channels // RUN),
        "VALUE_BLOCKS": -(-value_channels // RUN),
    }
    run = Prepared(
        target,
        RESTORE,
        tuple(settings.items()),
        groups=(blank_from + blank_tiles, 2, batch * heads),
        outputs=[
            ((batch, heads, columns, key_channels), history.window_keys.dtype),
            ((batch, heads, columns, value_channels), history.window_values.dtype),
        ],
    )
    keys, values = run([*history_arrays(history), counts, constant(layout, mx.int32)])
    return keys, values
