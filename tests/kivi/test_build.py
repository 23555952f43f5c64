"""One cache a layer: which layers get the spec's, which keep their own, which models are refused."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from kivi.attention import AttentionError
from kivi.build import describe_layers, install, make_prompt_cache
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec, LayerSpec, SpecError

KIVI = CacheSpec(backend="mlx")


def kinds(caches):
    return [type(cache) for cache in caches]


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("full", KVCache),
        ("kivi:bits=4,residual=32,backend=mlx", KIVICache),
        ("kivi-roundtrip:bits=4,backend=mlx", RoundTripKIVICache),
        ("mlx-quantized:bits=4,group=32", QuantizedKVCache),
    ],
)
def test_each_kind_of_spec_makes_its_caches(make_model, spec, kind):
    for name in ("llama", "qwen2"):  # qwen2 has no make_cache of its own
        caches = make_prompt_cache(make_model(name, hidden_size=128), CacheSpec.parse(spec))  # 32 numbers a head, a whole group
        assert kinds(caches) == [kind] * 3
    if kind is not KVCache:
        assert caches[0] is not caches[1]
        assert describe_layers(caches) == (3, {})


@pytest.mark.parametrize(
    "make", [make_prompt_cache, install, lambda _, spec: KIVICache(spec), lambda _, spec: RoundTripKIVICache(spec)]
)
def test_a_spec_given_as_text_is_one_sentence(make_model, make):
    with pytest.raises(SpecError, match=r"'kivi:bits=2': expected a CacheSpec; CacheSpec.parse reads one"):
        make(make_model("llama"), "kivi:bits=2")


def test_mlx_lms_own_quantised_cache_is_given_bits_and_group(make_model):
    model = make_model("llama", head_dim=128)
    cache = make_prompt_cache(model, CacheSpec(kind="mlx-quantized", key_bits=3, value_bits=3, group_size=128))[0]
    assert (cache.bits, cache.group_size) == (3, 128)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_what_mlx_lms_quantised_cache_cannot_hold_is_refused_and_nothing_else(make_model, bits, group_size, head_dim):
    """It is given tokens to see what it can hold: of 3, 5 and 6 bits the rooms of some sizes are too small."""
    array = mx.zeros((1, 1, 2, head_dim))
    try:
        mx.eval(QuantizedKVCache(group_size, bits).update_and_fetch(array, array))
        holds = True
    except ValueError:
        holds = False
    model = make_model("llama", num_hidden_layers=1, head_dim=head_dim)
    spec = CacheSpec(kind="mlx-quantized", key_bits=bits, value_bits=bits, group_size=group_size)
    if holds:
        assert kinds(make_prompt_cache(model, spec)) == [QuantizedKVCache]
        return
    for make in (make_prompt_cache, install):
        with pytest.raises(SpecError, match=rf"{head_dim} numbers a head[^\n]*$"):
            make(model, spec)


@pytest.mark.parametrize("kind", ["kivi", "kivi-roundtrip"])
def test_head_dimensions_that_cannot_be_rotated_are_refused(make_model, kind):
    spec = CacheSpec(kind=kind, rotate="keys", backend="mlx")
    for make in (make_prompt_cache, install):
        with pytest.raises(SpecError, match=r"^rotate=keys on llama: 72 channels cannot be rotated: [^\n]*$"):
            make(make_model("llama", head_dim=72), spec)
    bare = CacheSpec(**{**spec.model_dump(), "layers": {index: {"rotate": "none"} for index in range(3)}})
    assert len(make_prompt_cache(make_model("llama", head_dim=72), bare)) == 3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])  # qwen3: 48 channels; gpt_oss: attention sinks, sliding layers
def test_a_model_computes_with_rotated_caches_what_it_computes_with_the_unrotated(make_model, name):
    """Of 8 bits, which leave little error; prefill and decoding both."""
    model, prompt, logits = make_model(name), mx.arange(90)[None] % 97, {}
    for rotate in ("none", "both"):
        spec = CacheSpec(key_bits=8, value_bits=8, residual_length=8, rotate=rotate, param_dtype="float32", backend="mlx")
        cache = make_prompt_cache(model, spec)
        steps = [model(prompt[:, start:stop], cache=cache) for start, stop in ((0, 60), (60, 89), (89, 90))]
        logits[rotate] = mx.concatenate(steps, axis=1)
    full = model(prompt)
    errors = {rotate: mx.abs(out - full).max().item() for rotate, out in logits.items()}
    assert 0 < errors["both"] < 2 * errors["none"] < 0.2 * mx.abs(full).max().item()


def test_sliding_layers_keep_their_cache_and_are_listed(make_model):
    caches = make_prompt_cache(make_model("gpt_oss"), KIVI)
    assert kinds(caches) == [RotatingKVCache, KIVICache, RotatingKVCache, KIVICache]
    assert describe_layers(caches) == (2, {"0": "RotatingKVCache", "2": "RotatingKVCache"})


def test_single_layers_follow_their_own_settings(make_model):
    layers = {0: LayerSpec(key_bits=8), 1: LayerSpec(kind="kivi-roundtrip"), -1: LayerSpec(kind="full")}
    spec = CacheSpec(key_bits=2, backend="mlx", layers=layers)
    caches = make_prompt_cache(make_model("llama"), spec)
    assert kinds(caches) == [KIVICache, RoundTripKIVICache, KVCache]
    assert caches[0].spec.key_bits == 8
    assert describe_layers(caches) == (2, {"2": "KVCache"})


@pytest.mark.parametrize("name", ["gemma2"])
def test_a_model_that_computes_attention_by_itself_is_refused(make_model, name):
    model = make_model(name)
    with pytest.raises(AttentionError, match="gemma2: layers 0, 1, 2 compute attention without mlx-lm's scaled_dot_product"):
        make_prompt_cache(model, KIVI)
    with pytest.raises(AttentionError, match="would not see packed codes; use kind kivi-roundtrip or full"):
        install(model, KIVI)
    assert "make_cache" not in vars(model)
    assert kinds(make_prompt_cache(model, CacheSpec(kind="kivi-roundtrip", backend="mlx"))) == [RoundTripKIVICache] * 3


def test_latent_and_shared_attention_keep_their_cache_so_a_model_of_nothing_else_is_refused(make_model):
    for name in ("deepseek_v3", "iquestloopcoder"):
        with pytest.raises(AttentionError, match=rf"{name}: no layer attends to keys and values of its own .*; use kind"):
            make_prompt_cache(make_model(name), KIVI)


def test_a_recurrent_model_is_refused(make_model):
    for kind in ("kivi", "kivi-roundtrip", "mlx-quantized"):
        with pytest.raises(AttentionError, match=r"mamba: no layer attends to keys and values of its own .*ArraysCache"):
            make_prompt_cache(make_model("mamba"), CacheSpec(kind=kind))
    make_prompt_cache(make_model("mamba"), CacheSpec(kind="full"))


def test_settings_for_a_layer_that_is_not_there_or_keeps_its_own_are_refused(make_model):
    with pytest.raises(SpecError, match=r"layers\[3\]: the model has 3 layers, 0 to 2"):
        make_prompt_cache(make_model("llama"), CacheSpec(backend="mlx", layers={3: LayerSpec(key_bits=4)}))
    with pytest.raises(SpecError, match=r"layers\[2\]: this layer of gpt_oss keeps its own RotatingKVCache"):
        make_prompt_cache(make_model("gpt_oss"), CacheSpec(backend="mlx", layers={-2: LayerSpec(key_bits=4)}))
    make_prompt_cache(make_model("gpt_oss"), CacheSpec(backend="mlx", layers={0: LayerSpec(kind="full")}))


def test_making_caches_changes_neither_weights_nor_make_cache(make_model):
    model = make_model("llama")
    before = {name: mx.array(weight) for name, weight in tree_flatten(model.parameters())}
    make_prompt_cache(model, KIVI)
    after = dict(tree_flatten(model.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert kinds(mlx_lm_cache.make_prompt_cache(model)) == [KVCache] * 3


def test_a_pipeline_over_several_machines_is_refused_in_words(make_model):
    model = make_model("qwen2")
    model.model.pipeline_size = 2
    with pytest.raises(AttentionError, match="qwen2: its layers are spread over several machines, which wants kind full"):
        make_prompt_cache(model, KIVI)
    assert kinds(make_prompt_cache(model, CacheSpec(kind="full"))) == [KVCache] * 3
