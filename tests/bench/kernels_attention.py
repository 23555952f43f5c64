"""Fused decode attention on packed codes against MLX's attention on the full float16 cache.

python tests/bench/kernels_attention.py --out tests/bench/results/kernels_attention.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from timing import Arm, interleave_calls, parser, report

from kivi.backends import Backend, History, resolve
from kivi.backends.kernels import attention as kernel_attention
from kivi.backends.kernels.backend import KernelBackend
from kivi.cache.storage import CODE_STEP
from kivi.codec import Codecs
from kivi.quantize import padded_length

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

GROUP = 32
WINDOW = 128
FULL_BYTES = 2 * 2  # keys and values, float16


class Shape(NamedTuple):
    batch: int
    heads: int
    tokens: int
    channels: int


SHAPES = [Shape(16, 32, 8192, 128), Shape(1, 32, 8192, 128), Shape(1, 8, 131072, 128), Shape(256, 32, 512, 128)]
SETS = {SHAPES[0]: 2, SHAPES[1]: 8, SHAPES[2]: 6, SHAPES[3]: 2}  # so that what is read again has left the L2 cache


class Inputs(NamedTuple):
    queries: mx.array
    keys: mx.array
    values: mx.array
    history: History


Attend = Callable[[mx.array, Inputs], mx.array]


def make(backend: Backend, shape: Shape, repeats: int, bits: int) -> Inputs:
    """Return queries, the full cache and the same tokens packed, the last 128 exact, with a cache's capacity."""
    batch, heads, tokens, channels = shape
    keys, values = (mx.random.normal((batch, heads, tokens, channels), mx.float16) for _ in range(2))
    coded = tokens - WINDOW
    capacity = padded_length(coded, CODE_STEP)
    codecs = Codecs.of(key_bits=bits, value_bits=bits, group_size=GROUP, param_dtype=mx.float16)
    history = History(
        codecs=codecs,
        sink_keys=None,
        sink_values=None,
        keys=backend.quantize(keys[:, :, :capacity], codecs.keys),
        values=backend.quantize(values[:, :, :capacity], codecs.values),
        window_keys=mx.contiguous(keys[:, :, coded:]),
        window_values=mx.contiguous(values[:, :, coded:]),
        sink_count=0,
        code_count=coded,
        window_count=WINDOW,
    )
    inputs = Inputs(mx.random.normal((batch, heads * repeats, 1, channels), mx.float16), keys, values, history)
    mx.eval(inputs.queries, keys, values, *history.keys, *history.values, history.window_keys, history.window_values)
    return inputs


def packed_bytes(history: History) -> int:
    arrays = [*history.keys, *history.values, history.window_keys, history.window_values]
    return sum(array.nbytes for array in arrays)


def in_turn(attend: Attend, sets: list[Inputs], first: int, calls: int) -> mx.array:
    """Chain ``calls`` calls, each with the next set's cache and the last one's result as queries, as layers follow layers."""
    queries = sets[first % len(sets)].queries
    for turn in range(first, first + calls):
        queries = attend(queries, sets[turn % len(sets)])
    return queries


def measure(backend: KernelBackend, shape: Shape, repeats: int, bits: int, rounds: int, calls: int) -> dict[str, Any]:
    """Return timings, bytes and bytes a second of one shape, and the largest difference between packed and portable results."""
    sets = [make(backend, shape, repeats, bits) for _ in range(SETS[shape])]
    scale = shape.channels**-0.5
    arguments = {"scale": scale, "causal": True, "mask": None, "sinks": None}

    def full(queries: mx.array, one: Inputs) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, one.keys, one.values, scale=scale)

    def packed(queries: mx.array, one: Inputs) -> mx.array:
        return backend.decode_attention(queries, one.history, **arguments)

    def portable(queries: mx.array, one: Inputs) -> mx.array:
        return kernel_attention.decode_attention(backend.target, queries, one.history, **arguments)

    def chain(attend: Attend) -> Arm:
        return lambda first, calls: in_turn(attend, sets, first, calls)

    arms = {"full": chain(full), "packed": chain(packed), "packed_portable": chain(portable)}
    row = interleave_calls(arms, "full", rounds=rounds, calls=calls)
    moved = packed_bytes(sets[0].history)
    full_bytes = FULL_BYTES * shape.batch * shape.heads * shape.tokens * shape.channels
    results = [attend(sets[0].queries, sets[0]).astype(mx.float32) for attend in (packed, portable)]
    difference = mx.max(mx.abs(results[0] - results[1])).item()
    return row | {
        "shape": shape._asdict(),
        "queries_a_head": repeats,
        "bits": bits,
        "bytes_full": full_bytes,
        "bytes_packed": moved,
        "byte_limit": full_bytes / moved,
        "packed_gb_per_s": moved / row["arms"]["packed"]["ms"]["median"] / 1e6,
        "full_gb_per_s": full_bytes / row["arms"]["full"]["ms"]["median"] / 1e6,
        "largest_difference_to_portable": difference,
    }


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--backend", default="auto")
    options_of.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    options_of.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    options_of.add_argument("--rounds", type=int, default=15)
    options_of.add_argument("--calls", type=int, default=96, help="chained calls that share the start of their graph")
    options = options_of.parse_args()
    backend = resolve(options.backend)
    if not isinstance(backend, KernelBackend):
        options_of.error(f"backend {backend.name} has no kernels to time")
    rows = []
    for shape in SHAPES[: options.shapes]:
        for repeats in (1, 4):
            for bits in options.bits:
                rows.append(measure(backend, shape, repeats, bits, options.rounds, options.calls))
                mx.clear_cache()
                facts = {"backend": backend.name, "group_size": GROUP, "window": WINDOW, "dtype": "float16"}
                report("kernels-attention", options, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
