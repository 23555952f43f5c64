"""What a generated task is: a text around filler, its right answer, and the words that both are made of."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from wonderwords import RandomWord


class Draft(NamedTuple):
    """One question.

    Attributes:
        write: Returns the text before the answer with that many units of filler; more units, a longer text.
        answer: The right answer; several are joined by ``", "``.
        depth: Where in the text the one fact stands, as a share; None where there are several.
    """

    write: Callable[[int], str]
    answer: str
    depth: float | None = None


Task = Callable[[random.Random], Draft]


class Filler:
    """Units of filler that are drawn once each, so that a longer text begins as a shorter one does."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw
        self._drawn: list[str] = []

    def first(self, count: int) -> list[str]:
        while len(self._drawn) < count:
            self._drawn.append(self._draw())
        return self._drawn[:count]

    def around(self, count: int, facts: Sequence[tuple[float, str]]) -> list[str]:
        """Return the first ``count`` units with each fact at its depth, a share of the units."""
        units = self.first(count)
        for depth, fact in sorted(facts, reverse=True):
            units.insert(round(depth * count), fact)
        return units


@cache
def nouns() -> tuple[str, ...]:
    """Return some thousand English nouns of one word."""
    return tuple(RandomWord().filter(include_categories=["noun"], regex="[a-z]+", word_min_length=4, word_max_length=9))


@cache
def adjectives() -> tuple[str, ...]:
    """Return some hundred English adjectives of one word."""
    return tuple(RandomWord().filter(include_categories=["adjective"], regex="[a-z]+"))


def word_keys(chance: random.Random, count: int) -> list[str]:
    """Return different keys such as ``quick-harbor``, as RULER makes them."""
    return [f"{chance.choice(adjectives())}-{noun}" for noun in chance.sample(nouns(), count)]


def numbers(chance: random.Random, count: int) -> list[str]:
    """Return different numbers of seven digits."""
    return [str(number) for number in chance.sample(range(1_000_000, 10_000_000), count)]


def uuids(chance: random.Random, count: int) -> list[str]:
    return [str(uuid.UUID(int=chance.getrandbits(128), version=4)) for _ in range(count)]
