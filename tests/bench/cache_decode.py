"""Decode attention of one layer: on codes against fused attention on full keys and values, one query a sequence.

Arms, interleaved and paired within each round: the full cache's arrays by ``mx.fast.scaled_dot_product_attention``, and
the backend's attention on packed codes with scales and zeros in float16 and in float32. All tokens but the window are codes.
"""

from __future__ import annotations

from collections.abc import Callable

import kivi  # noqa: F401  # isort: skip  it loads OpenBLAS before MLX

import mlx.core as mx
from timing import interleave, parser, ratios, report, spread

from kivi.cache.single import KIVICache
from kivi.measure.backends.parity import DTYPES
from kivi.spec import CacheSpec


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    options.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--heads", type=int, default=32)
    options.add_argument("--kv-heads", type=int, default=32, help="fewer than --heads for grouped queries")
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    options.add_argument("--backend", default="mlx")
    options.add_argument("--rounds", type=int, default=50)
    chosen = options.parse_args()

    dtype, dim, results = DTYPES[chosen.dtype], chosen.head_dim, []
    for tokens in chosen.tokens:
        keys, values = mx.random.normal((2, chosen.batch, chosen.kv_heads, tokens, dim)).astype(dtype)
        queries = mx.random.normal((chosen.batch, chosen.heads, 1, dim)).astype(dtype)
        full_keys, full_values = mx.contiguous(keys), mx.contiguous(values)
        mx.eval(queries, full_keys, full_values)

        def attend_full(queries=queries, keys=full_keys, values=full_values) -> None:
            mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5))

        arms: dict[str, Callable[[], None]] = {"full": attend_full}
        for bits in chosen.bits:
            for params in ("float16", "float32"):
                spec = CacheSpec(key_bits=bits, value_bits=bits, param_dtype=params, backend=chosen.backend)
                cache = KIVICache(spec)
                cache.update_and_fetch(keys, values)
                cache.bytes()

                def attend(queries=queries, cache=cache) -> None:
                    mx.eval(cache.attend(queries, scale=dim**-0.5))

                arms[f"{bits}-bit, {params} parameters"] = attend
        times = interleave(arms, chosen.rounds)
        speedup = ratios(times, "full")
        results += [
            {"tokens": tokens, "arm": name, "seconds": spread(samples), "times_as_fast_as_full": speedup[name]}
            for name, samples in times.items()
        ]
    report("cache-decode", chosen, results)


if __name__ == "__main__":
    main()
