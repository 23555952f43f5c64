"""Texts to token sequences of the lengths that are measured, deterministically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kivi.measure import MeasureError
from kivi.measure.settings import MeasureSettings

SEPARATOR = "\n\n"
SPREAD = 262_144  # tokens that prompts are spread over where a set has more, so that a large one costs no more than they do


class TokenStream:
    """The texts of a prompt set, tokenised one by one and joined by blank lines, as far as tokens are asked for.

    Args:
        tokenizer: The model's.
        texts: What the model reads, in order. One that begins with the tokenizer's own first token, as a chat template may
            have it, is taken without: each sequence begins with one.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._separator = encode(tokenizer, SEPARATOR)
        self._start = start_tokens(tokenizer)
        self._texts = texts
        self._taken = 0
        self._tokens: list[int] = []

    def __len__(self) -> int:
        while self._taken < len(self._texts):
            self._read(len(self._tokens) + SPREAD)
        return len(self._tokens)

    def _read(self, count: int) -> int:
        """Tokenise until there are ``count`` tokens or no more texts; return how many there are."""
        while len(self._tokens) < count and self._taken < len(self._texts):
            tokens = encode(self._tokenizer, self._texts[self._taken])
            begins = bool(self._start) and tokens[:1] == self._start
            self._tokens += tokens[begins:] + self._separator
            self._taken += 1
        return len(self._tokens)

    def pack(self, count: int, length: int) -> list[list[int]]:
        """Cut ``count`` sequences of ``length`` tokens, one after the other, none twice.

        Where the tokenizer begins texts with a token of its own, each sequence begins with it.

        Raises:
            MeasureError: the texts are too short in all.
        """
        taken = length - len(self._start)
        if count * taken > self._read(count * taken):
            raise MeasureError(
                f"{count} sequences of {length} tokens need {count * taken} tokens, the {len(self._texts)} texts have "
                f"{len(self)}: give more or longer texts, or measure fewer or shorter sequences"
            )
        return [self._start + self._tokens[taken * index : taken * (index + 1)] for index in range(count)]

    def windows(self, count: int, length: int) -> list[list[int]]:
        """Cut ``count`` prompts of ``length`` tokens at even distances; they overlap only where the texts are too short.

        The distances are those of the first ``SPREAD`` tokens, to the end of a text.

        Raises:
            MeasureError: the texts are shorter than one prompt, or too short for ``count`` different ones.
        """
        taken = length - len(self._start)
        room = self._read(max(SPREAD, taken + count - 1)) - taken
        if room < count - 1:
            raise MeasureError(
                f"{count} different prompts of {length} tokens need {taken + count - 1} tokens, the {len(self._texts)} texts "
                f"have {room + taken}: give more or longer texts, or a shorter context"
            )
        starts = [room * index // max(1, count - 1) for index in range(count)]
        return [self._start + self._tokens[start : start + taken] for start in starts]


def require_tokens(stream: TokenStream, settings: MeasureSettings) -> None:
    """Raise unless ``stream`` has what a cell and its timing cut from it.

    Raises:
        MeasureError: the texts are too short.
    """
    stream.pack(settings.score.sequences, settings.score.length + 1)
    stream.windows(settings.generation.continuations, settings.generation.context)
    for context in settings.throughput.contexts:
        stream.windows(settings.throughput.rounds + 1, context)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text`` alone, nothing before or after."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_begun(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text`` after what the tokenizer puts before a text, unless it begins with that itself."""
    start, tokens = start_tokens(tokenizer), encode(tokenizer, text)
    return tokens if start and tokens[:1] == start else start + tokens


def start_tokens(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text: a beginning-of-sequence token, or nothing."""
    first = getattr(tokenizer, "bos_token_id", None)
    plain, special = encode(tokenizer, "a"), list(tokenizer.encode("a"))
    return [first] if first is not None and special[:1] == [first] and plain[:1] != [first] else []
