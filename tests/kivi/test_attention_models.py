"""mlx-lm's architectures with packed caches, on tiny random models."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

from kivi.build import describe_layers, make_prompt_cache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt_oss", "deepseek_v2", "afm7", "gemma4_text"]
WIDE = CacheSpec(key_bits=8, value_bits=8, residual_length=512, backend="mlx")
NARROW = CacheSpec(key_bits=2, value_bits=2, residual_length=16, sink_length=32, backend="mlx")
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(120)]  # frontier 96: the next 24 tokens flush nothing
NOISE = 1e-4  # float32, relative to the largest logit


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_while_nothing_is_quantised_the_tokens_are_those_of_the_full_cache(make_model, name):
    model = make_model(name)
    prompt = mx.array(PROMPT[:40])

    def generated(cache):
        return list(generate_step(prompt, model, max_tokens=24, prompt_cache=cache, prefill_step_size=16))

    expected = generated(make_prompt_cache(model, CacheSpec(kind="full")))
    for (token, logprobs), (full_token, full_logprobs) in zip(generated(make_prompt_cache(model, WIDE)), expected, strict=True):
        assert token == full_token
        assert mx.array_equal(logprobs, full_logprobs)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 3, 20])  # decoding, drafts, a chunk of a prompt
def test_logits_equal_those_of_a_full_cache_that_holds_the_dequantised_history(make_model, name, length):
    model = make_model(name)
    caches = make_prompt_cache(model, NARROW)
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    control = [filled(cache) if isinstance(cache, KIVICache) else copy.deepcopy(cache) for cache in caches]
    exact = make_prompt_cache(model, CacheSpec(kind="full"))
    mx.eval(model(mx.array([PROMPT]), cache=exact))
    tokens = mx.array([PROMPT[:length]])
    expected, got, unquantised = (model(tokens, cache=cache) for cache in (control, caches, exact))
    size = mx.max(mx.abs(expected)).item()
    assert mx.max(mx.abs(got - expected)).item() < NOISE * size
    assert mx.max(mx.abs(got - unquantised)).item() > 10 * NOISE * size  # the history really is quantised
    assert describe_layers(caches).quantized == {"gpt_oss": 2, "afm7": 2, "gemma4_text": 1}.get(name, 3)


def filled(cache):
    """Return a full cache with what ``cache`` remembers."""
    full = KVCache()
    full.update_and_fetch(*cache.dequantized())
    return full
