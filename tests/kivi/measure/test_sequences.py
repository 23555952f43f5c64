from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kivi.measure import MeasureError
from kivi.measure.sequences import TokenStream


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=40), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 30))
def test_sequences_follow_one_another_and_none_is_made_up(
    byte_tokenizer: Any, texts: list[str], count: int, length: int
) -> None:
    stream = TokenStream(byte_tokenizer, texts)
    whole = [token for text in texts for token in byte_tokenizer.encode(text + "\n\n")]
    assert len(stream) == len(whole)
    if count * length > len(whole):
        with pytest.raises(MeasureError, match="give more or longer texts"):
            stream.pack(count, length)
        return
    packed = stream.pack(count, length)
    assert [len(sequence) for sequence in packed] == [length] * count
    assert [token for sequence in packed for token in sequence] == whole[: count * length]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(3, 60))
def test_prompts_have_their_length_and_start_at_different_places(byte_tokenizer: Any, count: int, length: int) -> None:
    text = "".join(chr(33 + number) for number in range(80))
    stream = TokenStream(byte_tokenizer, [text])
    if length + count - 1 > len(stream):
        with pytest.raises(MeasureError, match="different prompts"):
            stream.windows(count, length)
        return
    prompts = stream.windows(count, length)
    assert {len(prompt) for prompt in prompts} == {length}
    assert len({prompt[0] for prompt in prompts}) == count
    if count * length <= len(stream):
        starts = [ord(byte_tokenizer.decode(prompt[:1])) - 33 for prompt in prompts]
        assert all(later - earlier >= length for earlier, later in itertools.pairwise(starts))


def test_a_tokenizers_own_first_token_begins_every_sequence(byte_tokenizer: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")  # noqa: S106  no password
    stream = TokenStream(tokenizer, ["some text that is long enough"])
    for sequence in [*stream.pack(2, 8), *stream.windows(2, 8)]:
        assert len(sequence) == 8
        assert sequence[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in sequence[1:]


def test_too_little_text_is_one_sentence_with_the_numbers(byte_tokenizer: Any) -> None:
    with pytest.raises(MeasureError, match="2 sequences of 64 tokens need 128 tokens, the 1 texts have 7"):
        TokenStream(byte_tokenizer, ["short"]).pack(2, 64)
