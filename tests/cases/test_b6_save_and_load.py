"""B6: a saved quantised prompt cache cannot be loaded, or comes back as another class."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from kivi.attention import attention_installed
from kivi.build import make_prompt_cache
from kivi.cache.single import DequantizedKIVICache, KIVICache
from kivi.spec import CacheSpec

QUERY = mx.ones((1, 4, 1, 72)) * 0.1


def filled(kind: type[KIVICache], dtype: mx.Dtype, sinks: int, count: int = 200) -> KIVICache:
    mx.random.seed(count)
    cache = kind(CacheSpec(residual_length=32, sink_length=sinks, key_bits=4, value_bits=2, backend="mlx"))
    cache.update_and_fetch(*(mx.random.normal((1, 2, count, 72)).astype(dtype) for _ in range(2)))
    return cache


@pytest.mark.parametrize("kind", [KIVICache, DequantizedKIVICache])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sinks", [0, 32])
def test_200_tokens_saved_and_loaded_go_on_as_before(tmp_path, kind, dtype, sinks):
    cache = filled(kind, dtype, sinks)
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), [cache], {"model": "none"})
    (loaded,), metadata = load_prompt_cache(str(tmp_path / "prompt.safetensors"), return_metadata=True)
    assert type(loaded) is kind and metadata == {"model": "none"}
    assert loaded.spec == cache.spec and loaded.offset == 200 and loaded.frontier == cache.frontier > 0
    token = mx.ones((1, 2, 1, 72), dtype)
    outs = []
    for each in (cache, loaded):
        each.update_and_fetch(token, token)
        outs.append(each.attend(QUERY.astype(dtype), scale=0.1))
    assert mx.array_equal(*outs).item()
    assert loaded.bytes() == cache.bytes()


def test_a_model_goes_on_with_the_same_logits(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50,
    }
    mx.random.seed(6)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    prompt = mx.random.randint(0, 50, (1, 200))
    with attention_installed(model):
        caches = make_prompt_cache(model, CacheSpec(residual_length=32, backend="mlx"))
        model(prompt, cache=caches)
        save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
        loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
        assert [type(cache) for cache in loaded] == [KIVICache, KIVICache]
        logits = [model(mx.array([[7]]), cache=each) for each in (caches, loaded)]
    assert mx.array_equal(*logits).item()


@pytest.mark.parametrize("count", [3, 32, 64])
def test_caches_with_parts_empty_survive_too(tmp_path, count):
    """Sinks half full, nothing quantised, or a window without a token."""
    mx.random.seed(0)
    cache = KIVICache(CacheSpec(residual_length=0, sink_length=32, backend="mlx"))
    cache.update_and_fetch(mx.random.normal((1, 1, count, 64)), mx.random.normal((1, 1, count, 64)))
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), [cache, KIVICache(cache.spec)])
    loaded, empty = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    assert empty.empty() and empty.spec == cache.spec
    assert loaded.offset == count and loaded.frontier == cache.frontier
    for ours, theirs in zip(loaded.dequantized(), cache.dequantized(), strict=True):
        assert mx.array_equal(ours, theirs).item()


def test_the_file_holds_the_tokens_and_no_spare_capacity(tmp_path):
    cache = filled(KIVICache, mx.float16, 0, count=1000)
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), [cache])
    assert (tmp_path / "prompt.safetensors").stat().st_size < cache.bytes().accounted + 16384
