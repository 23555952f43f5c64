"""Round trip, and quantise and pack, against plain and compiled MLX operations and ``mx.quantize``.

python tests/bench/kernels_quantize.py --out tests/bench/results/kernels_quantize.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from timing import Arm, interleave_calls, parser, report

from kivi.backends import Backend, resolve
from kivi.codec import Codecs

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

HEADS, CHANNELS, GROUP = 32, 128, 32
FLUSHES = (32, 128, 512, 2048, 8192)
SETS = 4


def flush_inputs(tokens: int) -> list[mx.array]:
    sets = [mx.random.normal((1, HEADS, tokens, CHANNELS), mx.float16) for _ in range(SETS)]
    mx.eval(sets)
    return sets


def round_trip(backend: Backend, tokens: int, bits: int, rounds: int) -> dict[str, Any]:
    """Time the round trip of keys and values, as a flush does both."""
    keys, values = flush_inputs(tokens), flush_inputs(tokens)
    codecs = Codecs.of(key_bits=bits, value_bits=bits, group_size=GROUP, param_dtype=mx.float16)

    def plain(k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        return codecs.keys.roundtrip(k), codecs.values.roundtrip(v)

    compiled = mx.compile(plain)

    def kernels(k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        return backend.group_roundtrip(k, codecs.keys), backend.group_roundtrip(v, codecs.values)

    def repeat(run: Callable[[mx.array, mx.array], object]) -> Arm:
        return lambda first, calls: [run(keys[turn % SETS], values[turn % SETS]) for turn in range(first, first + calls)]

    arms = {"mlx": repeat(plain), "mlx_compiled": repeat(compiled), backend.name: repeat(kernels)}
    row = interleave_calls(arms, "mlx", rounds=rounds)
    differing = sum(mx.sum(a != b).item() for a, b in zip(kernels(keys[0], values[0]), plain(keys[0], values[0]), strict=True))
    moved = 2 * 2 * keys[0].nbytes
    gigabytes = moved / row["arms"][backend.name]["ms"]["median"] / 1e6
    return row | {"what": "round trip", "tokens": tokens, "bits": bits, "differing": differing, "gb_per_s": gigabytes}


def packing(backend: Backend, tokens: int, bits: int, rounds: int) -> dict[str, Any]:
    """Time packing keys and values; ``mx.quantize``, along the last axis only, gets keys transposed beforehand."""
    keys, values = flush_inputs(tokens), flush_inputs(tokens)
    turned = [mx.contiguous(k.swapaxes(-1, -2)) for k in keys]
    mx.eval(turned)
    codecs = Codecs.of(key_bits=bits, value_bits=bits, group_size=GROUP, param_dtype=mx.float16)

    def definition(turn: int) -> list[mx.array]:
        both = zip(codecs, (keys[turn % SETS], values[turn % SETS]), strict=True)
        return [array for codec, x in both for array in codec.pack(codec.quantize(x))]

    def affine(turn: int) -> list[mx.array]:
        quantize = partial(mx.quantize, group_size=GROUP, bits=bits)
        return [*quantize(turned[turn % SETS]), *quantize(values[turn % SETS])]

    def kernels(turn: int) -> list[mx.array]:
        return [
            *backend.quantize(keys[turn % SETS], codecs.keys),
            *backend.quantize(values[turn % SETS], codecs.values),
        ]

    def repeat(run: Callable[[int], object]) -> Arm:
        return lambda first, calls: [run(turn) for turn in range(first, first + calls)]

    arms = {"mx.quantize": repeat(affine), "mlx": repeat(definition), backend.name: repeat(kernels)}
    row = interleave_calls(arms, "mx.quantize", rounds=rounds)
    return row | {"what": "quantise and pack", "tokens": tokens, "bits": bits}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--backend", default="auto")
    options_of.add_argument("--rounds", type=int, default=15)
    options = options_of.parse_args()
    backend = resolve(options.backend)
    rows = []
    for bits in (2, 4):
        for tokens in FLUSHES:
            for what in (round_trip, packing):
                rows.append(what(backend, tokens, bits, options.rounds))
                shape = {"batch": 1, "heads": HEADS, "channels": CHANNELS, "group_size": GROUP}
                facts = {"backend": backend.name, "shape": shape, "dtype": "float16"}
                report("kernels-quantize", options, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
