"""M1: a finite number beyond float16 gives NaN or wrong outputs. Right: held in float32 parameters, refused in float16 ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from kivi.attention import attention_installed
from kivi.build import make_prompt_cache
from kivi.cache.batch import BatchKIVICache
from kivi.cache.overflow import NonFiniteError
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

TOKEN = 40  # where the number sits: in the second group, which ends at 63
FLUSH = 96  # tokens after which a window of 32 lets that group go
REMEDY = "float16 scales and zeros do not hold them; use param_dtype=float32 (params=float32 in a spec's text)"
WHERE = ("the keys of row 0, head 1, channel 5, tokens 32 to 63", "the values of row 0, head 1, channels 0 to 31, token 40")

EXCESS = [  # numbers of one group, and what is said of it at 2 bits
    (-1e5, None, "go below -65,504"),
    (3e5, None, "range over more than 196,512"),
    (-6e4, 1.5e5, "range over more than 196,512"),
]


def spec(**changes: Any) -> CacheSpec:
    return CacheSpec(**({"kind": "kivi", "key_bits": 2, "value_bits": 2, "residual_length": 32, "backend": "mlx"} | changes))


def tokens(count: int, side: int, number: float, second: float | None = None, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """Return keys and values with ``number`` in channel 5 of token 40, and ``second`` beside it in its group."""
    pair = list(mx.random.normal((2, 1, 2, count, 64), key=mx.random.key(1)).astype(dtype))
    pair[side][0, 1, TOKEN, 5] = number
    if second is not None:
        pair[side][0, 1, TOKEN + (side == 0), 5 + (side == 1)] = second
    return pair


def feed(cache: Any, pair: list[mx.array], calls: list[int]) -> int:
    """Give tokens in calls; return how many were taken before the cache refused."""
    start = 0
    for count in calls:
        try:
            cache.update_and_fetch(*(part[..., start : start + count, :] for part in pair))
        except NonFiniteError:
            return start
        start += count
    return start


def refused(cache: Any, pair: list[mx.array]) -> str:
    """Return how a cache that refused its last call refuses the next one."""
    with pytest.raises(NonFiniteError) as error:
        cache.update_and_fetch(*(part[..., :1, :] for part in pair))
    return str(error.value)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("number", "second", "reach"), EXCESS)
def test_a_group_that_float16_cannot_hold(side, number, second, reach, dtype):
    pair = tokens(120, side, number, second, dtype)
    for calls, most in (([1] * 120, FLUSH + 1), ([100, 1, 1], 100), ([95, 5, 1, 1], 100), ([7] * 17, 98)):
        cache = KIVICache(spec())
        assert feed(cache, pair, calls) <= most, calls
        assert refused(cache, pair) == f"{WHERE[side]} {reach}: {REMEDY}"
    rounding = RoundTripKIVICache(spec(kind="kivi-roundtrip"))
    assert feed(rounding, pair, [1] * 120) == FLUSH - 1
    assert refused(rounding, pair) == f"{WHERE[side]} {reach}: {REMEDY}"


@pytest.mark.parametrize("kind", ["kivi", "kivi-roundtrip"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("number", "second", "params"), [(1e5, None, "float16"), *((*case[:2], "float32") for case in EXCESS)])
def test_what_the_parameters_hold_is_held(kind, side, number, second, params):
    make = KIVICache if kind == "kivi" else RoundTripKIVICache
    cache, pair = make(spec(kind=kind, param_dtype=params)), tokens(120, side, number, second)
    assert feed(cache, pair, [1] * 120) == 120
    step = (max(number, second or 0, 0) - min(number, 0)) / 3
    for held, exact in zip(cache.keys_and_values(), pair, strict=True):
        assert mx.max(mx.abs(held - exact)).item() <= 0.51 * step + 100


@pytest.mark.parametrize("side", [0, 1])
def test_a_range_beyond_float32_is_refused_with_another_remedy(side):
    pair = tokens(120, side, -3e38, 3e38)
    cache = KIVICache(spec(param_dtype="float32"))
    feed(cache, pair, [120, 1])
    assert refused(cache, pair).endswith("float32 scales and zeros do not hold them; use kind full")


@pytest.mark.parametrize("side", [0, 1])
def test_a_float16_cache_whose_rounding_leaves_float16(side):
    pair = tokens(120, side, -65504, 65504, mx.float16)
    cache = KIVICache(spec())
    assert feed(cache, pair, [1] * 120) == FLUSH + 1
    assert refused(cache, pair) == f"{WHERE[side]} would be restored as up to 65,536, beyond float16: {REMEDY}"
    assert feed(KIVICache(spec(param_dtype="float32")), pair, [1] * 120) == 120


QUESTIONS = {
    "state": lambda cache: cache.state,
    "trim": lambda cache: cache.trim(1),
    "merge": lambda cache: KIVICache.merge([cache]),
    "keys_and_values": lambda cache: cache.keys_and_values(),
    "dequantized": lambda cache: cache.dequantized(),
    "bytes": lambda cache: cache.bytes(),
    "nbytes": lambda cache: cache.nbytes,
    "check_finite": lambda cache: cache.check_finite(3),
    "state of a copy": lambda cache: copy.deepcopy(cache).state,
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_whatever_asks_for_the_numbers_is_refused_at_once(ask):
    cache = KIVICache(spec())
    assert feed(cache, tokens(FLUSH, 0, -1e5), [FLUSH - 1, 1]) == FLUSH  # its last call quantised the group
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="channel 5"):
            ask(cache)


def test_a_full_cache_is_not_converted():
    full = KVCache()
    full.update_and_fetch(*tokens(120, 1, -1e5))
    with pytest.raises(NonFiniteError, match="go below -65,504"):
        KIVICache.from_full(full, spec())


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_of_a_batch(side):
    exact, bad = tokens(120, side, 1.0), tokens(120, side, -1e5)
    both = [mx.concatenate(list(parts)) for parts in zip(exact, bad, strict=True)]
    batch = BatchKIVICache(spec(), [0, 0])
    assert feed(batch, both, [1] * 120) == FLUSH + 1
    words = f"{WHERE[side].replace('row 0', 'row 1')} go below -65,504: {REMEDY}"
    assert refused(batch, both) == words
    for ask in (lambda: batch.state, lambda: batch.extract(0), lambda: batch.nbytes, batch.keys_and_values):
        with pytest.raises(NonFiniteError, match=re.escape(words)):
            ask()
    batch.filter([0])  # without that row it goes on
    assert feed(batch, exact, [1, 1, 1]) == 3


def test_a_cache_saved_with_such_a_group_is_refused_once_loaded(tmp_path):
    cache = KIVICache(spec())
    feed(cache, tokens(100, 1, -1e5), [100])
    cache._settle()
    cache._unchecked.waiting.clear()  # as versions that did not look
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), [cache])
    (loaded,) = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    assert "token 40 go below -65,504" in refused(loaded, tokens(100, 1, 1.0))


def test_nan_of_the_model_is_not_called_a_number_beyond_float16():
    pair = tokens(120, 0, float("nan"))
    for cache in (KIVICache(spec()), RoundTripKIVICache(spec(kind="kivi-roundtrip"))):
        feed(cache, pair, [120, 1])
        assert refused(cache, pair) == "NaN or infinity in the key group at token 32; look at the model's weights and dtype"


@pytest.mark.parametrize("kind", ["kivi", "kivi-roundtrip"])
def test_a_vector_that_leaves_float16_when_it_is_rotated_is_not_blamed_on_the_model_alone(kind):
    pair = tokens(120, 0, 1.0, dtype=mx.float16)
    pair[0][0, 1, TOKEN] = 60_000
    cache = (KIVICache if kind == "kivi" else RoundTripKIVICache)(spec(kind=kind, rotate="keys"))
    feed(cache, pair, [120, 1])
    assert "or use rotate=none: a vector longer than 65,504 may leave float16" in refused(cache, pair)
    late = KIVICache(spec(kind="kivi", rotate="keys"))
    feed(late, pair, [TOKEN + 1])
    with pytest.raises(NonFiniteError, match=r"layer 2: NaN or infinity in the exact key at token 40; .* or use rotate=none"):
        late.check_finite(2)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A model of two layers whose second has values in the hundred thousands."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 97,
    }
    mx.random.seed(0)
    large = llama.Model(llama.ModelArgs.from_dict(config))
    large.layers[1].self_attn.v_proj.weight *= 1e6
    with attention_installed(large):
        yield large


@pytest.mark.parametrize(("prompt", "most"), [(120, 0), (20, FLUSH - 32 - 20 + 2)])
def test_generation_with_a_model_of_such_values_ends_within_two_tokens(model, prompt, most):
    generated = []
    with pytest.raises(NonFiniteError, match=r"layer 1: the values of row 0, head ., .*: float16 scales and zeros do not hold"):
        for token, _ in generate_step(
            mx.arange(prompt) % 97, model, max_tokens=100, prompt_cache=make_prompt_cache(model, spec())
        ):
            generated.append(token)
    assert len(generated) <= most
    held = make_prompt_cache(model, spec(param_dtype="float32"))
    assert len(list(generate_step(mx.arange(prompt) % 97, model, max_tokens=50, prompt_cache=held))) == 50


def test_the_layer_is_named_wherever_the_cache_comes_from(model, tmp_path):
    for kind in ("kivi", "kivi-roundtrip"):
        assert [cache.layer for cache in make_prompt_cache(model, spec(kind=kind))] == [0, 1]
    caches = make_prompt_cache(model, spec())
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    pair = tokens(120, 0, -1e5)
    for cache in (caches[1], loaded[1], copy.deepcopy(make_prompt_cache(model, spec())[1])):
        feed(cache, pair, [120, 1])
        assert refused(cache, pair).startswith("layer 1: the keys of row 0")
    batch = KIVICache.merge(make_prompt_cache(model, spec())[1:])
    assert batch.layer == batch.extract(0).layer == BatchKIVICache.from_state(batch.state).layer == 1
    with pytest.raises(NonFiniteError, match="layer 7: the keys of row 0"):
        caches[1].check_finite(7)
