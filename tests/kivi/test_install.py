"""install: everything that asks a model for its cache gets the spec's."""

from __future__ import annotations

import sys

import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache

from kivi import attention
from kivi.build import install, make_prompt_cache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

TWO_BITS = CacheSpec(key_bits=2, value_bits=2, backend="mlx")
FOUR_BITS = CacheSpec(key_bits=4, value_bits=4, backend="mlx")


def kinds(model):
    return {type(cache) for cache in mlx_lm_cache.make_prompt_cache(model)}


def bits(model):
    return {cache.spec.key_bits for cache in mlx_lm_cache.make_prompt_cache(model)}


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with a make_cache of its own and without
def test_the_model_gives_packed_caches_until_it_is_undone(make_model, name):
    model = make_model(name)
    module = sys.modules[f"mlx_lm.models.{name}"]
    with install(model, TWO_BITS):
        assert kinds(model) == {KIVICache}
        assert module.scaled_dot_product_attention is attention.scaled_dot_product_attention
    assert kinds(model) == {KVCache}
    assert module.scaled_dot_product_attention is attention.MLX_LM_ATTENTION
    assert "make_cache" not in vars(model)


def test_without_a_block_it_stays_and_undo_may_be_called_twice(make_model):
    model = make_model("llama")
    installation = install(model, TWO_BITS)
    assert kinds(model) == {KIVICache}
    installation.undo()
    installation.undo()
    assert kinds(model) == {KVCache}


def test_installing_again_replaces_the_spec_and_undoing_brings_it_back(make_model):
    model = make_model("llama")
    first = install(model, TWO_BITS)
    second = install(model, FOUR_BITS)
    assert bits(model) == {4}
    with pytest.raises(RuntimeError, match="undo the newer one first"):
        first.undo()
    second.undo()
    assert bits(model) == {2}
    first.undo()
    assert kinds(model) == {KVCache}


def test_an_installed_model_still_makes_the_caches_that_are_asked_for(make_model):
    model = make_model("llama")
    with install(model, TWO_BITS):
        assert {type(cache) for cache in make_prompt_cache(model, CacheSpec(kind="full"))} == {KVCache}
        assert {cache.spec.key_bits for cache in make_prompt_cache(model, FOUR_BITS)} == {4}


def test_each_request_gets_caches_of_its_own(make_model):
    model = make_model("llama")
    with install(model, TWO_BITS):
        one, two = mlx_lm_cache.make_prompt_cache(model), mlx_lm_cache.make_prompt_cache(model)
    assert not {id(cache) for cache in one} & {id(cache) for cache in two}


def test_installing_adds_nothing_to_the_weights(make_model):
    model = make_model("llama")
    before = [name for name, _ in tree_flatten(model.parameters())]
    with install(model, TWO_BITS):
        assert [name for name, _ in tree_flatten(model.parameters())] == before


def test_draft_and_target_are_installed_independently(make_model):
    target, draft = make_model("llama"), make_model("llama", seed=1, num_hidden_layers=2)
    with install(target, TWO_BITS), install(draft, FOUR_BITS):
        assert bits(target) == {2}
        assert bits(draft) == {4}
