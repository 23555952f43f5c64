"""mlx-lm's whole protocol on packed caches: generation, chunked prefill, drafts, reuse, saving."""

from __future__ import annotations

import copy
import json

import mlx.core as mx
import pytest
from mlx_lm.generate import generate, generate_step, speculative_generate_step, stream_generate
from mlx_lm.models.cache import LRUPromptCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kivi.attention import AttentionError
from kivi.build import install, make_prompt_cache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

SPEC = CacheSpec(key_bits=4, value_bits=4, residual_length=16, sink_length=32, backend="mlx")
PROMPT = [(7 * i * i + 3 * i + 1) % 97 for i in range(110)]
NOISE = 1e-4  # float32, relative to the largest logit


def tokens_of(model, prompt, cache, count=40, **kwargs):
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache, **kwargs)]


def next_logits(model, caches, tokens=(5,)):
    """Return the logits after ``tokens`` without touching ``caches``."""
    return model(mx.array([list(tokens)]), cache=copy.deepcopy(caches))[0, -1]


def assert_close(got, expected):
    assert mx.max(mx.abs(got - expected)).item() < NOISE * mx.max(mx.abs(expected)).item()


@pytest.fixture
def model(make_model):
    return make_model("llama")


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(97)} | {"</s>": 97}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="w0"))  # noqa: S106


def test_generate_stream_generate_and_generate_step_agree(model, tokenizer):
    expected = tokens_of(model, PROMPT, make_prompt_cache(model, SPEC))
    streamed = stream_generate(model, tokenizer, PROMPT, max_tokens=40, prompt_cache=make_prompt_cache(model, SPEC))
    assert [response.token for response in streamed] == expected
    with install(model, SPEC):  # nobody passes a cache
        assert tokens_of(model, PROMPT, None) == expected
        assert generate(model, tokenizer, PROMPT, max_tokens=40).split() == [f"w{token}" for token in expected]


def test_kv_bits_cannot_quantise_a_packed_cache_again(model):
    caches = make_prompt_cache(model, SPEC)
    assert tokens_of(model, PROMPT, caches, kv_bits=8, quantized_kv_start=0) == tokens_of(
        model, PROMPT, make_prompt_cache(model, SPEC)
    )
    assert {type(cache) for cache in caches} == {KIVICache}


@pytest.mark.parametrize("step", [1, 7, 17, 64])
def test_what_the_first_layer_stores_does_not_depend_on_chunks(model, step):
    # Later layers store what they compute from attention, for which a chunk's own tokens are exact.
    caches, whole = make_prompt_cache(model, SPEC), make_prompt_cache(model, SPEC)
    tokens_of(model, PROMPT, caches, count=1, prefill_step_size=step)
    tokens_of(model, PROMPT, whole, count=1)
    expected, got = whole[0].state, caches[0].state
    assert got["offset"] == expected["offset"] > len(PROMPT)
    assert caches[0].frontier == whole[0].frontier > SPEC.sink_length
    assert mx.allclose(got["window_keys"], expected["window_keys"], atol=1e-5)
    same = mx.mean(got["key_words"] == expected["key_words"]).item()
    assert same > 0.99  # chunks of another size are other matrix products: float noise may move a code


def test_who_asks_one_layer_after_a_prompt_waits_for_all_at_once(model):
    """One after the other a GPU would idle between them."""
    trimmed, asked = (make_prompt_cache(model, SPEC) for _ in range(2))
    for caches in (trimmed, asked):
        model(mx.arange(200)[None] % 50, cache=caches)
    mx.eval(asked[0].state)
    assert {cache.frontier for cache in asked} == {SPEC.sink_length + SPEC.quantized_tokens(200)}
    assert {cache.frontier for cache in trimmed} == {SPEC.sink_length}, "what may be forgotten yet is quantised"


def test_chunks_of_one_call_each_equal_any_chunks_while_the_window_covers_them(model):
    wide = CacheSpec(key_bits=2, value_bits=2, residual_length=128, backend="mlx")
    expected = tokens_of(model, PROMPT, make_prompt_cache(model, wide))
    for step in (1, 7, 64):
        assert tokens_of(model, PROMPT, make_prompt_cache(model, wide), prefill_step_size=step) == expected


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("same", [True, False], ids=["right drafts", "wrong drafts"])
def test_speculative_decoding_goes_on_across_flushes(make_model, model, drafts, same):
    spec = CacheSpec(key_bits=8, value_bits=8, residual_length=16, backend="mlx")
    draft = model if same else make_model("llama", seed=1, num_hidden_layers=1)
    caches = make_prompt_cache(model, spec) + make_prompt_cache(draft, spec)
    steps = list(
        speculative_generate_step(mx.array(PROMPT), model, draft, num_draft_tokens=drafts, max_tokens=120, prompt_cache=caches)
    )
    tokens = [token for token, _, _ in steps]
    accepted = sum(from_draft for _, _, from_draft in steps)
    assert (accepted > 50) == same
    assert {cache.offset for cache in caches[:3]} == {caches[0].offset}
    assert min(cache.frontier for cache in caches[:3]) >= 192  # 6 groups, most of them while drafts came and went
    # What the full cache, fed the same tokens, thinks of each: 8 bits may only swap tokens that are nearly tied.
    full = model(mx.array([PROMPT + tokens[:-1]]))[0, len(PROMPT) - 1 :]
    chosen = mx.take_along_axis(full, mx.array(tokens)[:, None], axis=-1)[:, 0]
    assert mx.max(mx.max(full, axis=-1) - chosen).item() < 0.1  # logits reach 10


def test_a_conversation_continues_from_a_trimmed_cache_as_from_the_surviving_tokens(model):
    caches = make_prompt_cache(model, SPEC)
    mx.eval(model(mx.array([PROMPT[:100]]), cache=caches))
    kept = copy.deepcopy(caches)
    mx.eval(model(mx.array([PROMPT[:9]]), cache=caches))  # no group is full in between: the state comes back
    assert trim_prompt_cache(caches, 9) == 9
    assert_close(next_logits(model, caches), next_logits(model, kept))


def test_the_servers_store_hands_out_trimmed_copies(model):
    store = LRUPromptCache()
    with install(model, SPEC):
        caches = make_prompt_cache(model, SPEC)
        answer = tokens_of(model, PROMPT, caches)
        store.insert_cache("model", PROMPT + answer, caches)
        before = [cache.bytes() for cache in caches]
        assert store.nbytes == sum(weight.resident for weight in before)
        reused, rest = store.fetch_nearest_cache("model", [*PROMPT, 3, 4])
        assert rest == [3, 4]
        assert {cache.offset for cache in reused} == {len(PROMPT)}
        assert len(tokens_of(model, rest, reused)) == 40
    assert [cache.bytes() for cache in caches] == before


def test_a_saved_cache_goes_on_where_it_was(model, tmp_path):
    caches = make_prompt_cache(model, SPEC)
    tokens_of(model, PROMPT, caches)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches, {"spec": json.dumps(SPEC.model_dump())})
    loaded, metadata = load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert CacheSpec(**json.loads(metadata["spec"])) == SPEC
    assert [type(cache) for cache in loaded] == [KIVICache] * 3
    assert tokens_of(model, [9], loaded) == tokens_of(model, [9], caches)


def test_packed_caches_are_stopped_in_a_model_that_would_not_ask_them(model):
    with pytest.raises(AttentionError, match=r"does not attend through kivi: make its caches with kivi\.make_prompt_cache"):
        model(mx.array([PROMPT]), cache=[KIVICache(SPEC) for _ in model.layers])


@pytest.mark.parametrize("rotate", ["none", "both"])
@pytest.mark.parametrize("before", [78, 79, 108])  # tokens; the first group is quantised with the 80th, then every 32nd
def test_a_short_calls_queries_see_what_they_would_one_at_a_time(model, before, rotate):
    """At 2 bits a group that is seen exact instead of quantised moves logits by far more than float noise."""
    spec = CacheSpec(key_bits=2, value_bits=2, residual_length=16, sink_length=32, rotate=rotate, backend="mlx")
    for count in (2, 5, 16):
        at_once, one_by_one = (make_prompt_cache(model, spec) for _ in range(2))
        for caches in (at_once, one_by_one):
            mx.eval(model(mx.array([PROMPT[:before]]), cache=caches))
        tokens = PROMPT[40 : 40 + count]
        together = model(mx.array([tokens]), cache=at_once)[0]
        alone = mx.stack([model(mx.array([[token]]), cache=one_by_one)[0, -1] for token in tokens])
        assert_close(together, alone)
        assert_close(next_logits(model, at_once), next_logits(model, one_by_one))


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_drafts_that_are_right_change_nothing_at_few_bits(model, bits, drafts):
    spec = CacheSpec(key_bits=bits, value_bits=bits, residual_length=16, backend="mlx")
    plain = list(generate_step(mx.array(PROMPT), model, max_tokens=80, prompt_cache=make_prompt_cache(model, spec)))
    caches = make_prompt_cache(model, spec) + make_prompt_cache(model, spec)
    drafted = speculative_generate_step(
        mx.array(PROMPT), model, model, num_draft_tokens=drafts, max_tokens=80, prompt_cache=caches
    )
    for (token, logprobs), (other, theirs, _) in zip(plain, drafted, strict=True):
        assert token == other
        assert_close(theirs, logprobs)
