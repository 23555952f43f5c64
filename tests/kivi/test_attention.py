"""How mlx-lm's attention is made to ask the cache, and how that is checked."""

from __future__ import annotations

import sys
import threading

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kivi import attention

LLAMA = "mlx_lm.models.llama"


class AskedCache(KVCache):
    """An ordinary cache that answers for itself and counts how often it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def attend(self, queries, *, scale, mask, sinks):
        self.asked += 1
        keys, values = self.keys_and_values()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def bound(module=LLAMA):
    return sys.modules[module].scaled_dot_product_attention is attention.scaled_dot_product_attention


def test_a_cache_that_attends_is_asked_and_any_other_goes_to_mlx_lm(make_model):
    model = make_model("llama")
    tokens = mx.array([[1, 2, 3, 4]])
    expected = model(tokens, cache=make_prompt_cache(model))
    with attention.attention_installed(model):
        asked = [AskedCache(), KVCache(), AskedCache()]
        assert mx.array_equal(model(tokens, cache=asked), expected)
        assert mx.array_equal(model(tokens), expected)
    assert [cache.asked for cache in asked if isinstance(cache, AskedCache)] == [1, 1]


def test_the_sinks_of_gpt_oss_reach_the_cache(make_model):
    model = make_model("gpt_oss")
    seen = []

    class Notes(AskedCache):
        def attend(self, queries, *, scale, mask, sinks):
            seen.append(sinks)
            return super().attend(queries, scale=scale, mask=mask, sinks=sinks)

    with attention.attention_installed(model):
        caches = [Notes() if type(cache) is KVCache else cache for cache in make_prompt_cache(model)]
        mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    assert [sinks.shape for sinks in seen] == [(4,), (4,)]


def test_only_the_modules_of_the_model_are_touched(make_model):
    make_model("qwen2")
    with attention.attention_installed(make_model("llama")):
        assert bound()
        assert not bound("mlx_lm.models.qwen2")
        assert base.scaled_dot_product_attention is attention.MLX_LM_ATTENTION
    assert not bound()


def test_blocks_nest_and_a_lasting_installation_outlives_them(make_model):
    model = make_model("llama")
    with attention.attention_installed(model):
        with attention.attention_installed(make_model("llama", seed=1)):
            assert bound()
        assert bound()
    assert not bound()
    with pytest.raises(KeyError), attention.attention_installed(model):
        raise KeyError
    assert not bound()
    with attention.attention_installed(model):
        attention.install_attention(model)
        attention.install_attention(model)
    assert bound()


def test_overlapping_blocks_in_threads_leave_the_module_as_it_was(make_model):
    model = make_model("llama")
    failures = []

    def work():
        for _ in range(50):
            with attention.attention_installed(model):
                if not bound():
                    failures.append("unbound inside a block")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not bound()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "deepseek_v2"])
def test_the_probe_passes_models_that_attend_through_mlx_lm(make_model, name):
    model = make_model(name)
    assert attention.probe_attention(model, make_prompt_cache(model)) == dict.fromkeys(range(3), "on codes")


def test_the_probe_passes_layers_whose_tokens_others_share(make_model):
    model = make_model("afm7")
    assert attention.probe_attention(model, make_prompt_cache(model)) == {0: "on codes", 1: "on codes"}


def test_the_probe_looks_at_ordinary_caches_only(make_model):
    model = make_model("gpt_oss")
    assert attention.probe_attention(model, make_prompt_cache(model)) == {1: "on codes", 3: "on codes"}


def test_the_probe_finds_attention_that_is_computed_inline(make_model):
    model = make_model("gemma2")
    assert set(attention.probe_attention(model, make_prompt_cache(model)).values()) == {"not called"}


def test_the_probe_finds_latent_attention_that_changes_what_it_fetched(make_model):
    model = make_model("deepseek_v3")
    assert set(attention.probe_attention(model, make_prompt_cache(model)).values()) == {"transformed"}


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("gemma4_text", {1: "on codes", 3: "shared"}),  # the last two layers attend to what layers 2 and 3 fetched
        ("iquestloopcoder", dict.fromkeys(range(3), "shared")),  # so does the second loop to the first's
        ("afm7", {0: "on codes", 1: "on codes"}),  # its last layer asks the cache for all that it has
    ],
)
def test_the_probe_finds_layers_that_attend_to_what_another_fetched(make_model, name, verdicts):
    model = make_model(name)
    assert attention.probe_attention(model, make_prompt_cache(model)) == verdicts


def test_the_probe_finds_attention_that_somebody_else_replaced(make_model, monkeypatch):
    model = make_model("llama")

    def theirs(queries, keys, values, cache, scale, mask, sinks=None):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    monkeypatch.setattr(sys.modules[LLAMA], "scaled_dot_product_attention", theirs)
    assert set(attention.probe_attention(model, make_prompt_cache(model)).values()) == {"not called"}
    assert sys.modules[LLAMA].scaled_dot_product_attention is theirs


def test_the_probe_computes_nothing(make_model):
    model = make_model("llama", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    attention.probe_attention(model, make_prompt_cache(model))
    assert mx.get_peak_memory() <= before + 4096  # token ids


def test_a_packed_cache_in_a_model_without_the_dispatch_is_stopped(make_model):
    model = make_model("llama")

    class Careful(AskedCache):
        def update_and_fetch(self, keys, values):
            attention.require_dispatch(sys._getframe(1).f_globals)
            return super().update_and_fetch(keys, values)

    tokens = mx.array([[1, 2]])
    with pytest.raises(attention.AttentionError, match=r"mlx_lm\.models\.llama does not attend through kivi"):
        model(tokens, cache=[Careful() for _ in model.layers])
    with attention.attention_installed(model):
        model(tokens, cache=[Careful() for _ in model.layers])
    Careful().update_and_fetch(mx.zeros((1, 1, 1, 32)), mx.zeros((1, 1, 1, 32)))
