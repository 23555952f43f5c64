"""Texts to token sequences of the lengths that are measured, deterministically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kivi.measure import MeasureError

SEPARATOR = "\n\n"


class TokenStream:
    """All texts of a prompt set, tokenised one by one and joined by blank lines.

    Args:
        tokenizer: The model's.
        texts: What the model reads, in order.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        separator = encode(tokenizer, SEPARATOR)
        self._start = start_tokens(tokenizer)
        self._tokens: list[int] = []
        for text in texts:
            self._tokens += encode(tokenizer, text) + separator
        self._texts = len(texts)

    def __len__(self) -> int:
        return len(self._tokens)

    def pack(self, count: int, length: int) -> list[list[int]]:
        """Cut ``count`` sequences of ``length`` tokens, one after the other, none twice.

        Where the tokenizer begins texts with a token of its own, each sequence begins with it.

        Raises:
            MeasureError: the texts are too short in all.
        """
        taken = length - len(self._start)
        if count * taken > len(self):
            raise MeasureError(
                f"{count} sequences of {length} tokens need {count * taken} tokens, the {self._texts} texts have {len(self)}: "
                "give more or longer texts, or measure fewer or shorter sequences"
            )
        return [self._start + self._tokens[taken * index : taken * (index + 1)] for index in range(count)]

    def windows(self, count: int, length: int) -> list[list[int]]:
        """Cut ``count`` prompts of ``length`` tokens at even distances; they overlap only where the texts are too short.

        Raises:
            MeasureError: the texts are shorter than one prompt, or too short for ``count`` different ones.
        """
        taken = length - len(self._start)
        room = len(self) - taken
        if room < count - 1:
            raise MeasureError(
                f"{count} different prompts of {length} tokens need {taken + count - 1} tokens, the {self._texts} texts have "
                f"{len(self)}: give more or longer texts, or a shorter context"
            )
        starts = [room * index // max(1, count - 1) for index in range(count)]
        return [self._start + self._tokens[start : start + taken] for start in starts]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text`` alone, nothing before or after."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def start_tokens(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text: a beginning-of-sequence token, or nothing."""
    first = getattr(tokenizer, "bos_token_id", None)
    plain, special = encode(tokenizer, "a"), list(tokenizer.encode("a"))
    return [first] if first is not None and special[:1] == [first] and plain[:1] != [first] else []
