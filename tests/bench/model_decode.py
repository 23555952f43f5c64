"""Whole-model decode of the embedded model at a long context, by cache: tokens a second, paired with the full cache.

    python tests/bench/model_decode.py --out model_decode.json

How fast a step is does not depend on what is remembered, so the caches are filled with random keys and values of the model's
shape rather than by a prefill, which takes a minute on a CPU at 4,096 tokens. A round decodes ``--steps`` tokens greedily
with each cache in turn; caches grow from round to round, all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timing import interleave, parser, ratios, report, spread

from kivi.build import make_prompt_cache
from kivi.measure.arms import settle
from kivi.measure.memory import cache_bytes
from kivi.models import LoadedModel, load_model
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)

SPECS = (
    "full",
    "kivi:bits=2",
    "kivi:bits=4",
    "kivi:bits=8",
    "kivi:key_bits=4,value_bits=2,sinks=32",
    "mlx-quantized:bits=2,group=32",
    "mlx-quantized:bits=4,group=32",
)


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--context", type=int, default=4096)
    options_of.add_argument("--steps", type=int, default=32, help="a round; 32 flush each cache once")
    options_of.add_argument("--rounds", type=int, default=7)
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options = options_of.parse_args()
    model = load_model()
    arms: dict[str, Callable[[], None]] = {}
    held: dict[str, int] = {}
    for text in options.specs:
        spec = CacheSpec.parse(text)
        caches = filled(model, spec, options.context)
        held[spec.slug] = sum(cache_bytes(cache).resident for cache in caches)
        arms[spec.slug] = lambda caches=caches: decode(model, caches, options.steps)
    times = interleave(arms, options.rounds)
    speedup = ratios(times, "full")
    rows = [
        {
            "cache": slug,
            "tokens_per_second": spread([options.steps / seconds for seconds in samples]),
            "times_as_fast_as_full": speedup[slug],
            "resident_bytes": held[slug],
        }
        for slug, samples in times.items()
    ]
    report("model_decode", options, {"model_dtype": model.dtype, "rows": rows})


def filled(model: LoadedModel, spec: CacheSpec, tokens: int) -> list[Any]:
    """Return the model's caches with random keys and values of ``tokens`` tokens in each."""
    args = model.model.args
    caches = make_prompt_cache(model.model, spec)
    shape = (2, 1, args.num_key_value_heads, tokens, args.hidden_size // args.num_attention_heads)
    for cache in caches:
        cache.update_and_fetch(*mx.random.normal(shape).astype(getattr(mx, model.dtype)))
    settle(caches)
    return caches


def decode(model: LoadedModel, caches: list[Any], steps: int) -> None:
    """Decode greedily, a token a call."""
    token = mx.array([[1]])
    for _ in range(steps):
        token = mx.argmax(model.model(token, cache=caches)[:, -1:], axis=-1)
        mx.eval(token)


if __name__ == "__main__":
    main()
