"""Memory of whole models by MLX's meter: peaks at prefill and decode against the full cache, and a long decode's drift.

A small llama with random weights, prefilled in chunks as mlx-lm does it. Peaks are over what was allocated before the cache
was made. The drift is what MLX holds, less what the caches report, over ``--steps`` decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kivi  # noqa: F401  # isort: skip  it loads OpenBLAS before MLX

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as make_full_cache
from timing import parser, report

from kivi.accounting import sum_bytes
from kivi.build import make_prompt_cache
from kivi.measure.backends.parity import DTYPES
from kivi.measure.memory import settled_memory
from kivi.spec import CacheSpec


def build_model(layers: int, heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> Any:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": 64,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def peaks(model: Any, make: Callable[[Any], list[Any]], prompt: int, chunk: int, steps: int) -> dict[str, int]:
    """Return bytes above the start: peak at prefill, peak at decode, and what the caches hold in between."""
    before = settled_memory()
    caches = make(model)
    tokens = mx.arange(prompt)[None] % model.args.vocab_size
    mx.reset_peak_memory()
    for start in range(0, prompt, chunk):
        model(tokens[:, start : start + chunk], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()  # as mlx-lm does after each chunk
    prefill = mx.get_peak_memory() - before
    held = settled_memory() - before
    mx.reset_peak_memory()
    for _ in range(steps):
        mx.eval(model(mx.array([[1]]), cache=caches))
    return {"prefill_peak": prefill, "held": held, "decode_peak": mx.get_peak_memory() - before}


def drift(model: Any, make: Callable[[Any], list[Any]], steps: int, samples: int = 20) -> list[dict[str, int]]:
    """Decode ``steps`` tokens evaluating nothing but logits; return what MLX holds and what the caches report, in bytes."""
    before = settled_memory()
    caches = make(model)
    curve = []
    for step in range(1, steps + 1):
        mx.eval(model(mx.array([[step % model.args.vocab_size]]), cache=caches))
        if step % (steps // samples) == 0:
            held = settled_memory() - before
            curve.append({"step": step, "held": held, "reported": sum_bytes(cache.bytes() for cache in caches).resident})
    return curve


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=8192)
    options.add_argument("--chunk", type=int, default=2048)
    options.add_argument("--decode-steps", type=int, default=20)
    options.add_argument("--steps", type=int, default=10_000, help="steps of the drift; 0 leaves it out")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--heads", type=int, default=2)
    options.add_argument("--kv-heads", type=int, default=1)
    options.add_argument("--head-dim", type=int, default=128)
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    chosen = options.parse_args()

    model = build_model(chosen.layers, chosen.heads, chosen.kv_heads, chosen.head_dim, DTYPES[chosen.dtype])
    makers: dict[str, Callable[[Any], list[Any]]] = {"full": make_full_cache}
    for bits in (2, 4, 8):
        spec = CacheSpec(key_bits=bits, value_bits=bits, backend="mlx")
        makers[spec.slug] = lambda model, spec=spec: make_prompt_cache(model, spec)
        makers[f"mlx-quantized-{bits}"] = lambda model, bits=bits: [
            QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers
        ]
    measured = {name: peaks(model, make, chosen.prompt, chosen.chunk, chosen.decode_steps) for name, make in makers.items()}
    for figures in measured.values():
        figures |= {f"{key}_ratio": figures[key] / measured["full"][key] for key in list(figures)}
    results: dict[str, Any] = {"peaks": measured}
    if chosen.steps:
        small = build_model(2, 2, 1, 64, DTYPES[chosen.dtype])
        results["drift"] = drift(small, makers[CacheSpec(backend="mlx").slug], chosen.steps)
    report("cache-memory", chosen, results)


if __name__ == "__main__":
    main()
