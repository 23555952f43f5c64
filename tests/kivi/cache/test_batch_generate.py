"""mlx-lm's batch generator on packed caches: real models, real batches."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step

from kivi.build import install, make_prompt_cache
from kivi.cache.batch import BatchKIVICache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec, LayerSpec

SPEC = CacheSpec(key_bits=4, value_bits=4, residual_length=16, sink_length=32, backend="mlx")
MIXED = CacheSpec(key_bits=2, residual_length=16, backend="mlx", layers={0: LayerSpec(kind="full"), 2: LayerSpec(key_bits=8)})
LENGTHS = (9, 130, 1, 70)
# Rows of a batch differ from rows alone by float noise (2e-5 in logits up to 10), which can move a code by one step (2e-3 at
# 2 bits). Two tokens whose logits are closer than this may come in either order.
TIE = 0.01


def prompts():
    return [[(11 * i * i + 5 * i + row) % 97 for i in range(length)] for row, length in enumerate(LENGTHS)]


def run(generator, uids):
    tokens = {uid: [] for uid in uids}
    caches = {}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    return [tokens[uid] for uid in uids], [caches[uid] for uid in uids]


def chunks(prompt, size):
    """Cut a prompt as the batch generator does: its last token comes by itself."""
    body = prompt[:-1]
    return [body[start : start + size] for start in range(0, len(body), size)]


def assert_same_greedy_tokens(model, spec, calls, last, got):
    """Follow ``got`` with single caches, given ``calls`` and then ``last``: each token is the best one, or tied with it.

    Returns:
        How many were no ties.
    """
    caches = make_prompt_cache(model, spec)
    for call in calls:
        mx.eval(model(mx.array([call]), cache=caches))
    clear = 0
    for fed, token in zip([last, *got], got, strict=False):
        logits = model(mx.array([[fed]]), cache=caches)[0, -1]
        first, second = mx.sort(logits)[::-1][:2].tolist()
        if first - second > TIE:
            clear += 1
            assert token == mx.argmax(logits).item()
        else:
            assert first - logits[token].item() <= TIE
    return clear


@pytest.mark.parametrize(("name", "spec"), [("llama", SPEC), ("qwen2", MIXED), ("gpt_oss", SPEC), ("llama", MIXED)])
def test_rows_of_unequal_prompts_generate_their_own_tokens(make_model, name, spec):
    model = make_model(name)
    with install(model, spec):
        generator = BatchGenerator(model, max_tokens=40, prefill_step_size=48)
        tokens, caches = run(generator, generator.insert(prompts()))
    assert [len(row) for row in tokens] == [40] * 4
    clear = sum(
        assert_same_greedy_tokens(model, spec, chunks(prompt, 48), prompt[-1], row)
        for prompt, row in zip(prompts(), tokens, strict=True)
    )
    assert clear > 120  # of 160: most steps are no ties
    kinds = [type(cache) for cache in make_prompt_cache(model, spec)]
    for row, prompt in zip(caches, prompts(), strict=True):
        assert [type(cache) for cache in row] == kinds
        assert {cache.offset for cache in row} == {len(prompt) + 40}


def test_rows_that_come_and_go_generate_their_own_tokens(make_model):
    model = make_model("llama")
    with install(model, SPEC):
        generator = BatchGenerator(model, completion_batch_size=2, prefill_batch_size=1, prefill_step_size=64)
        uids = generator.insert(prompts(), max_tokens=[50, 5, 30, 45])
        tokens, _ = run(generator, uids)
    assert [len(row) for row in tokens] == [50, 5, 30, 45]
    for prompt, row in zip(prompts(), tokens, strict=True):
        assert assert_same_greedy_tokens(model, SPEC, chunks(prompt, 64), prompt[-1], row)


def test_the_generator_holds_packed_batches_only(make_model):
    model = make_model("llama")
    with install(model, SPEC):
        generator = BatchGenerator(model, max_tokens=8)
        generator.insert(prompts())
        while len(generator._generation_batch) < len(LENGTHS):
            generator.next()
        assert {type(cache) for cache in generator._generation_batch.prompt_cache} == {BatchKIVICache}
        assert generator.prompt_cache_nbytes == sum(cache.nbytes for cache in generator._generation_batch.prompt_cache)


def test_a_finished_row_can_be_continued_from_its_cache(make_model):
    model = make_model("llama")
    with install(model, SPEC):
        generator = BatchGenerator(model, max_tokens=20)
        first, caches = run(generator, generator.insert(prompts()))
        assert all(type(cache) is KIVICache for row in caches for cache in row)
        questions = [[5, 6, 7], [8], [9, 10], list(range(40))]
        tokens, _ = run(generator, generator.insert(questions, caches=caches))
    for prompt, answer, question, row in zip(prompts(), first, questions, tokens, strict=True):
        history = [*chunks(prompt, 2048), *([token] for token in [prompt[-1], *answer])]
        assert assert_same_greedy_tokens(model, SPEC, [*history, *chunks(question, 2048)], question[-1], row)


def test_one_row_in_a_batch_equals_generate_step(make_model):
    model = make_model("llama")
    prompt = prompts()[1]
    with install(model, SPEC):
        generator = BatchGenerator(model, max_tokens=40, prefill_step_size=32)
        [batched], _ = run(generator, generator.insert([prompt]))
    steps = generate_step(
        mx.array(prompt), model, max_tokens=40, prompt_cache=make_prompt_cache(model, SPEC), prefill_step_size=32
    )
    assert batched == [token for token, _ in steps]
