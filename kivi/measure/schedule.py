"""How a sequence is cut into calls, and which positions see a quantised key.

A scored position is the position of a query: the token that goes in there, whose logits predict the next one. With a
frontier that moves in whole groups, the query at position ``p`` sees its first quantised key when
``p + 1 >= sink_length + residual_length + group_size``.

Calls are cut where a frontier moves, so that every query of a call sees what it would see if tokens came one at a time:
chunked scoring is decoding, only faster. Within a call no frontier moves, so that no query can see a key group that holds its
own future, whether a cache flushes before it attends or after.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kivi.spec import CacheSpec

GRID = 32  # tokens a call of the reference, and the longest of a quantised cache: the smallest group
FULL_CALL = 4 * GRID  # of a full cache as a cell: other calls than the reference's, so its KL shows the noise of floats
PREFILL_CALL = 2048  # mlx-lm's default prefill_step_size


def reference_blocks(length: int) -> list[tuple[int, int]]:
    """Cut ``length`` positions where groups of 32 leave a window that is a multiple of 32, at 31, 63, and so on."""
    return _pairs(set(range(GRID - 1, length, GRID)), length)


def scoring_blocks(layers: Sequence[CacheSpec], length: int) -> list[tuple[int, int]]:
    """Return the stretches, each a whole number of calls, whose logits are compared at once."""
    if layers:
        return reference_blocks(length)
    return _pairs(set(range(FULL_CALL - 1, length, FULL_CALL)), length)


def cut_calls(layers: Sequence[CacheSpec], start: int, stop: int) -> list[tuple[int, int]]:
    """Cut positions ``start`` to ``stop`` into the calls that the caches of ``layers`` are scored in.

    Args:
        layers: The specs of the layers that quantise; none for a full cache.
        start: First position.
        stop: One past the last.
    """
    longest = _longest_call(layers)
    cuts = {position for spec in layers for position in _moves(spec, start, stop)}
    stretches = _pairs(cuts, stop, start)
    return [(begin, min(begin + longest, end)) for first, end in stretches for begin in range(first, end, longest)]


def prefill_call(layers: Sequence[CacheSpec]) -> int:
    """Return the most tokens of one call of a prefill: mlx-lm's default, and ``residual_length + 1`` for kivi-roundtrip."""
    return min([PREFILL_CALL, *(spec.residual_length + 1 for spec in layers if spec.kind == "kivi-roundtrip")])


def first_visible(layers: Sequence[CacheSpec]) -> int:
    """Return the first position whose query sees a quantised key in some layer; 0 for a full cache, where all count.

    mlx-lm's quantised cache rounds each token as it comes, so that its first query already sees its own key rounded.
    """
    return min((0 if spec.kind == "mlx-quantized" else _first_move(spec) for spec in layers), default=0)


def _longest_call(layers: Sequence[CacheSpec]) -> int:
    if not layers:
        return FULL_CALL
    return min([GRID, *(spec.residual_length + 1 for spec in layers if spec.kind == "kivi-roundtrip")])


def _first_move(spec: CacheSpec) -> int:
    return spec.sink_length + spec.residual_length + spec.group_size - 1


def _moves(spec: CacheSpec, start: int, stop: int) -> range:
    """Return the positions in ``start`` to ``stop`` whose query is the first to see one group more."""
    if spec.kind == "mlx-quantized":
        return range(0)
    first = _first_move(spec)
    skipped = max(0, -(-(start - first) // spec.group_size))
    return range(first + skipped * spec.group_size, stop, spec.group_size)


def _pairs(cuts: set[int], stop: int, start: int = 0) -> list[tuple[int, int]]:
    bounds = sorted({start, stop} | {cut for cut in cuts if start < cut < stop})
    return list(itertools.pairwise(bounds))
