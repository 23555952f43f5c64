"""RULER's synthetic tasks (arXiv 2404.06654, section 3, appendix B): needles, variable tracking, common and frequent words.

The sentences are our own, and essays are the town of :mod:`tasks.prompts.retrieval`; needles and chains are RULER's.
Common words come 10 times and the others once, not 30 and 3 times, so that a list fits into 1,024 tokens. Its question
answering (``qa_1``, ``qa_2``) is left out: it takes texts of others.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from functools import partial
from itertools import chain

from tasks.prompts.retrieval import sentence
from tasks.prompts.task import Draft, Filler, Task, adjectives, nouns, numbers, uuids, word_keys

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHAIN = 4  # assignments after the first of a chain
COMMON, COMMON_TIMES = 10, 10  # common words, and how often each comes; the others come once
FREQUENT = (9, 5, 3)  # how often each frequent word is in a part of a coded text
OTHERS, OTHERS_A_PART = 200, 5  # other words, and how many of them are in a part, once each

Draw = Callable[[random.Random, int], list[str]]


def needles(
    chance: random.Random, *, filler: str, keys: Draw, values: Draw, planted: int, values_each: int = 1, asked: int = 1
) -> Draft:
    """Plant facts ``key: value`` in filler and ask for the values of some keys.

    Args:
        chance: Draws everything.
        filler: ``noise``, ``town``, or ``needles``: facts of the same kind about other keys.
        keys: Draws keys.
        values: Draws values.
        planted: Keys with facts, beside filler.
        values_each: Facts about each key.
        asked: Keys that are asked for.
    """
    names = keys(chance, planted)
    facts = [(name, value) for name in names for value in values(chance, values_each)]
    chance.shuffle(facts)
    wanted = names[:asked]
    depths = [chance.choice(DEPTHS)] if len(facts) == 1 else [chance.random() for _ in facts]

    def other_fact() -> str:
        key = next(key for key in iter(lambda: keys(chance, 1)[0], "") if key not in names)
        return _fact(key, values(chance, 1)[0])

    units = Filler({"noise": lambda: NOISE, "town": lambda: sentence(chance), "needles": other_fact}[filler])
    planting = [(depth, _fact(*fact)) for depth, fact in zip(depths, facts, strict=True)]
    queried = " and ".join(filter(None, [", ".join(wanted[:-1]), wanted[-1]]))

    def write(count: int) -> str:
        context = "\n".join(units.around(count, planting))
        question = f"What are all the codes of {queried} in the text above?"
        return f"Some codes are hidden in the text below. Remember them.\n{context}\n{question} The codes of {queried} are:"

    standing = [value for name in wanted for _, fact in sorted(planting) for value in _value_of(fact, name)]
    return Draft(write, ", ".join(standing), depths[0] if len(depths) == 1 else None)


def variable_tracking(chance: random.Random) -> Draft:
    """Give variables a value, or that of one before, along a chain; ask which have the value of its first."""
    names = ["".join(chance.choices(string.ascii_uppercase, k=5)) for _ in range(2 * (CHAIN + 1))]
    (value, other), half = numbers(chance, 2), CHAIN + 1
    assignments = []
    for assigned, first in ((names[:half], value), (names[half:], other)):
        sources = [first, *assigned[:-1]]
        depths = sorted(chance.random() for _ in assigned)
        assignments += [
            (depth, f"VAR {name} = {source}") for depth, name, source in zip(depths, assigned, sources, strict=True)
        ]
    units = Filler(lambda: NOISE)

    def write(count: int) -> str:
        context = "\n".join(units.around(count, assignments))
        return (
            f"Remember the variables that are assigned in the text below.\n{context}\n"
            f"Which {half} variables are assigned the value {value}? The variables with the value {value} are:"
        )

    return Draft(write, ", ".join(names[:half]))


def common_words(chance: random.Random) -> Draft:
    """List words, ten of which come ten times as often as the others, and ask for the ten."""
    words = chance.sample(nouns(), len(nouns()))
    common, rare = words[:COMMON], chain(words[COMMON:], (f"{one}-{other}" for one in adjectives() for other in nouns()))
    units = Filler(lambda: next(rare))

    def write(count: int) -> str:
        listed = common * COMMON_TIMES + units.first(count)
        random.Random(" ".join(common)).shuffle(listed)  # noqa: S311 - texts, not secrets
        lines = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        return (
            f"Some words come often in the numbered list below. Remember them.\n{lines}\n"
            f"What are the {COMMON} most common words of the list? They are:"
        )

    return Draft(write, ", ".join(common))


def frequent_words(chance: random.Random) -> Draft:
    """Write a text of made-up words, three of which are in each part of it several times, and ask for the three."""
    words = ["".join(chance.choices(string.ascii_lowercase, k=6)) for _ in range(OTHERS + len(FREQUENT))]
    frequent, others = words[: len(FREQUENT)], words[len(FREQUENT) :]

    def part() -> str:
        drawn = [word for word, times in zip(frequent, FREQUENT, strict=True) for _ in range(times)]
        drawn += chance.sample(others, OTHERS_A_PART)
        chance.shuffle(drawn)
        return " ".join(drawn)

    units = Filler(part)

    def write(count: int) -> str:
        return (
            f"Some made-up words come often in the coded text below. Remember them.\n{' '.join(units.first(count + 1))}\n"
            f"What are the {len(frequent)} most frequent words of the coded text? They are:"
        )

    return Draft(write, ", ".join(frequent))


def _fact(key: str, value: str) -> str:
    return f"One of the codes of {key} is {value}."


def _value_of(fact: str, key: str) -> list[str]:
    start = f"One of the codes of {key} is "
    return [fact.removeprefix(start).removesuffix(".")] if fact.startswith(start) else []


RULER: dict[str, Task] = {
    "niah_single_1": partial(needles, filler="noise", keys=word_keys, values=numbers, planted=1),
    "niah_single_2": partial(needles, filler="town", keys=word_keys, values=numbers, planted=1),
    "niah_single_3": partial(needles, filler="town", keys=word_keys, values=uuids, planted=1),
    "niah_multikey_1": partial(needles, filler="town", keys=word_keys, values=numbers, planted=4),
    "niah_multikey_2": partial(needles, filler="needles", keys=word_keys, values=numbers, planted=1),
    "niah_multikey_3": partial(needles, filler="needles", keys=uuids, values=uuids, planted=1),
    "niah_multivalue": partial(needles, filler="town", keys=word_keys, values=numbers, planted=1, values_each=4),
    "niah_multiquery": partial(needles, filler="town", keys=word_keys, values=numbers, planted=4, asked=4),
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
}
