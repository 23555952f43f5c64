"""Prefill at batch 1: a prompt through packed caches beside the full cache.

    python tests/bench/prefill.py --out tests/bench/results/prefill_h200.json

The models of ``decode_batch1.py``. The prompt comes in calls of 2,048 tokens, and each call's caches are evaluated before the
next, as mlx-lm's generation does. Arms run in random order within a round; ``ratio`` is the full cache's time over the arm's of
the same round, and ``ratio_unrotated`` that of the same spec without its rotation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

from decode_batch1 import SPECS, VOCABULARY, random_llama
from timing import parser, report, spread

from kivi.build import make_prompt_cache
from kivi.measure.speed.timing import in_turns
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
from mlx_lm.models.llama import Model

STEP = 2048  # tokens a call: mlx-lm's default


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--shapes", nargs="+", default=["8B"])
    options_of.add_argument("--prompts", type=int, nargs="+", default=[2048, 16384])
    options_of.add_argument("--specs", nargs="+", default=SPECS)
    options_of.add_argument("--rounds", type=int, default=5)
    options = options_of.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        model = random_llama(name)
        mx.eval(model.parameters())
        for length in options.prompts:
            rows += measure(model, name, length, options)
            report("prefill", options, {"rows": rows})


def measure(model: Model, name: str, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every spec on one prompt; return a row a spec."""
    tokens = mx.random.randint(0, VOCABULARY, (1, length))
    arms = {text: partial(prefill, model, CacheSpec.parse(text), tokens) for text in options.specs}
    for arm in arms.values():
        arm(0)
    timed = in_turns(arms, options.rounds)
    rows = []
    for text, seconds in timed.items():
        row: dict[str, Any] = {"shape": name, "prompt": length, "spec": text, "ms": spread([1e3 * one for one in seconds])}
        for field, base in (("ratio", "full"), ("ratio_unrotated", text.replace(",rotate=both", ""))):
            if base in timed:
                rounds = [b / one for b, one in zip(timed[base], seconds, strict=True)]
                row |= {field: statistics.median(rounds), f"{field}_rounds": rounds}
        rows.append(row)
    return rows


def prefill(model: Model, spec: CacheSpec, tokens: mx.array, _: int) -> float:
    """Return the seconds until the first token after the prompt is there, caches made beforehand."""
    caches = make_prompt_cache(model, spec)
    mx.synchronize()
    mx.clear_cache()
    begun = time.perf_counter()
    for start in range(0, tokens.shape[1], STEP):
        logits = model(tokens[:, start : start + STEP], cache=caches)[:, -1, :]
        mx.eval([cache.state for cache in caches])
    mx.eval(mx.argmax(logits, axis=-1))
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
