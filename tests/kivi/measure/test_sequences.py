from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kivi.measure import MeasureError
from kivi.measure.sequences import TokenStream, encode_begun


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


@pytest.fixture(scope="module")
def beginning_tokenizer(byte_tokenizer: Any) -> Any:
    """A tokenizer that puts ``<s>`` before each text."""
    backend = Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")  # noqa: S106  no password


@pytest.mark.parametrize("written", ["", "<s>"])  # as a chat template has it
def test_a_tokenizers_own_first_token_begins_every_sequence_once(beginning_tokenizer: Any, written: str) -> None:
    stream = TokenStream(beginning_tokenizer, [f"{written}some text that is", f"{written}long enough"])
    for sequence in [*stream.pack(3, 9), *stream.windows(2, 8)]:
        assert sequence[0] == beginning_tokenizer.bos_token_id
        assert beginning_tokenizer.bos_token_id not in sequence[1:]
    assert encode_begun(beginning_tokenizer, f"{written}one") == beginning_tokenizer.encode("one")


def test_no_more_is_tokenised_than_is_needed(byte_tokenizer: Any) -> None:
    texts = Texts(100_000)
    stream = TokenStream(byte_tokenizer, texts)
    stream.pack(1, 352)
    assert texts.read == 11  # of 32 tokens, and two between them
    stream.windows(2, 32)
    assert texts.read < 10_000
    before = texts.read
    stream.windows(3, 64)
    stream.pack(2, 128)
    assert texts.read == before


class Texts(Sequence[str]):
    """Texts that count how many were read."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return "x" * 32


def test_too_little_text_is_one_sentence_with_the_numbers(byte_tokenizer: Any) -> None:
    with pytest.raises(MeasureError, match="2 sequences of 64 tokens need 128 tokens, the 1 texts have 7"):
        TokenStream(byte_tokenizer, ["short"]).pack(2, 64)
