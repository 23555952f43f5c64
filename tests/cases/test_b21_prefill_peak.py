"""B21: a quantised cache raises peak memory at prefill. Right: the whole model's peak is not above the full cache's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache as make_full_cache

import kivi.attention
from kivi.build import make_prompt_cache
from kivi.spec import CacheSpec

PROMPT = 8192
CHUNK = 2048


def peak_of_prefill(model: Any, make_cache: Callable[[Any], list[Any]]) -> int:
    """Return MLX's peak over a chunked prefill as mlx-lm does it, above what was allocated before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = make_cache(model)
    prompt = mx.arange(PROMPT)[None] % model.args.vocab_size
    for start in range(0, PROMPT, CHUNK):
        model(prompt[:, start : start + CHUNK], cache=cache)
        mx.eval([layer.state for layer in cache])
    return mx.get_peak_memory() - before


def test_8k_tokens_in_chunks_of_2048():
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    spec = CacheSpec(backend="mlx")
    full = peak_of_prefill(model, make_full_cache)
    with kivi.attention.attention_installed(model):
        packed = peak_of_prefill(model, lambda model: make_prompt_cache(model, spec))
    assert packed <= full, f"{packed / full:.2f}"
