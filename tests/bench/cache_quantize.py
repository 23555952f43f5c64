"""Quantise and pack the keys and the values of one layer, against ``mx.quantize`` of the same arrays.

``mx.quantize`` groups along the last axis alone and computes other codes: it shows what one pass may cost.
"""

from __future__ import annotations

from collections.abc import Callable

import kivi  # noqa: F401  # isort: skip  it loads OpenBLAS before MLX

import mlx.core as mx
from timing import interleave, parser, ratios, report, spread

from kivi.backends import resolve
from kivi.codec import Codecs
from kivi.measure.backends.parity import DTYPES


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[2048])
    options.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    options.add_argument("--params", choices=["float16", "float32"], default="float16")
    options.add_argument("--backend", default="mlx")
    options.add_argument("--rounds", type=int, default=30)
    chosen = options.parse_args()

    backend, results = resolve(chosen.backend), []
    for tokens in chosen.tokens:
        x = mx.random.normal((1, chosen.heads, tokens, chosen.head_dim)).astype(DTYPES[chosen.dtype])
        mx.eval(x)
        for bits in chosen.bits:
            codecs = Codecs.of(key_bits=bits, value_bits=bits, group_size=32, param_dtype=DTYPES[chosen.params])
            arms: dict[str, Callable[[], None]] = {
                "mx.quantize": lambda x=x, bits=bits: mx.eval(mx.quantize(x, group_size=32, bits=bits)),
                "keys": lambda x=x, codec=codecs.keys: mx.eval(backend.quantize(x, codec)),
                "values": lambda x=x, codec=codecs.values: mx.eval(backend.quantize(x, codec)),
            }
            times = interleave(arms, chosen.rounds)
            speed = ratios(times, "mx.quantize")
            results += [
                {"tokens": tokens, "bits": bits, "arm": name, "seconds": spread(samples), "times_as_fast": speed[name]}
                for name, samples in times.items()
            ]
    report("cache-quantize", chosen, results)


if __name__ == "__main__":
    main()
