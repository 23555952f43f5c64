"""Write the prompt set ``retrieval``: long texts with one planted fact each, and a question about it.

    python -m tasks.prompts.retrieval [FILE]

The texts are the log of a harbour town that does not exist, put together from the sentence patterns below by a seeded
generator: readable, without third-party text, and without any number of four digits but the planted one. Every length from
512 to 4,096 tokens of the embedded model is written with the fact at five depths, three texts each. The file that comes with
the project is this script's output, byte for byte.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kivi.models import load_model

SEED = 2402_02750  # the number of the KIVI paper on arXiv
LENGTHS = (512, 1024, 2048, 4096)  # tokens of the whole text, question and answer included, at most
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where the fact stands, as a share of the sentences
TEXTS = 3  # at each length and depth
PARAGRAPH = (4, 8)  # sentences, from and to

FACT = "The access code of the {place} is {code}."
QUESTION = "What is the access code of the {place}?"
LAYOUT = "{context}\n\nQuestion: {question}\nAnswer: {answer}"

SIDES = ("northern", "southern", "eastern", "western", "upper", "lower", "old", "new", "inner", "outer")
PLACES = (
    "harbour",
    "granary",
    "lighthouse",
    "boathouse",
    "chapel",
    "archive",
    "workshop",
    "observatory",
    "mill",
    "signal station",
)
PEOPLE = (
    "the harbour master",
    "a young carpenter",
    "the baker's daughter",
    "two fishermen",
    "the librarian",
    "an old sailor",
    "the schoolteacher",
    "a travelling clockmaker",
    "the keeper of the mill",
    "three apprentices",
    "the doctor",
    "a painter",
)
GOODS = (
    "salted fish",
    "oak planks",
    "barrels of cider",
    "coils of rope",
    "wool",
    "lamp oil",
    "clay tiles",
    "seed potatoes",
    "copper nails",
    "sailcloth",
    "crates of apples",
    "writing paper",
    "beeswax",
    "iron hinges",
    "dried beans",
    "glass jars",
)
WEATHER = (
    "a light rain",
    "thick fog",
    "a dry wind from the hills",
    "the first frost",
    "a long calm",
    "low clouds",
    "bright sun",
)
TIMES = (
    "before sunrise",
    "at noon",
    "late in the afternoon",
    "soon after dark",
    "on market day",
    "during the night",
    "at low tide",
)
MOODS = ("without hurry", "in good spirits", "with great care", "rather slowly", "in silence", "as quickly as possible")
THINGS = (
    "the rudder of a small boat",
    "the roof of the town hall",
    "a broken loom",
    "the bell rope",
    "the eastern stairs",
    "an iron stove",
    "the wheel of a cart",
    "a map of the coast",
    "the pump in the square",
    "a shelf of ledgers",
)
ROADS = (
    "the coast road",
    "the path through the orchard",
    "the bridge",
    "the ferry landing",
    "the quarry road",
    "the market square",
)

PATTERNS = (
    "{Person} repaired {thing} {time}, {mood}.",
    "There was {weather} {time}, and {road} stayed empty for a while.",
    "A cart with {goods} and {goods2} came in by way of {road}.",
    "{Person} sold {goods} to {person2} and wrote the price into a blue notebook.",
    "Nobody had seen {person} since {weather} closed {road}.",
    "{Time}, {person} carried {goods} past {road} {mood}.",
    "The town council argued for an hour about {thing} and then went home.",
    "Because of {weather}, the boats with {goods} arrived {time} instead.",
    "{Person} told {person2} that {thing} would last another winter.",
    "They counted {goods} {mood} and found that nothing was missing.",
    "Children watched {person} work on {thing} until it grew cold.",
    "A letter arrived {time}; {person} read it twice and asked {person2} for advice.",
    "It took {person} most of the week to move {goods} to a drier place.",
    "{Weather} kept {person} indoors, so {thing} had to wait.",
    "On {road}, {person} met {person2}, and they talked about {goods}.",
    "The price of {goods} rose a little, while {goods2} could hardly be sold.",
    "{Person} promised to look at {thing} {time}.",
    "Someone left {goods} beside {road}, and {person} put them under a roof {mood}.",
    "After {weather}, {person} checked {thing} and found only a loose screw.",
    "Music could be heard {time}, and even {person} stopped to listen.",
)


def write_rows(path: Path, count_tokens: Callable[[str], int]) -> None:
    """Write all rows as JSON lines.

    Args:
        path: The file.
        count_tokens: How many tokens a text has, without special ones.
    """
    lines = [json.dumps(row, ensure_ascii=True) + "\n" for row in make_rows(count_tokens)]
    path.write_bytes("".join(lines).encode())


def make_rows(count_tokens: Callable[[str], int]) -> Iterator[dict[str, str | int | float]]:
    """Yield ``id, context, question, answer, depth, length, tokens``, lengths interleaved so that a limit keeps them all."""
    chance = random.Random(SEED)  # noqa: S311 - texts, not secrets
    places = [f"{side} {place}" for side in SIDES for place in PLACES]
    chance.shuffle(places)
    for text in range(TEXTS):
        for depth in DEPTHS:
            for length in LENGTHS:
                place, code = places.pop(), str(chance.randint(1000, 9999))
                yield _row(f"{length}-{depth:g}-{text}", place, code, length, depth, chance, count_tokens)


def _row(
    name: str, place: str, code: str, length: int, depth: float, chance: random.Random, count_tokens: Callable[[str], int]
) -> dict[str, str | int | float]:
    fact, question = FACT.format(place=place, code=code), QUESTION.format(place=place)
    sentences: list[str] = []
    room = length - count_tokens(LAYOUT.format(context=fact, question=question, answer=code))
    while room > 0:
        sentences.append(_sentence(chance))
        room -= count_tokens(" " + sentences[-1])
    while True:  # counted apart, sentences have about as many tokens as together: take away what is too much
        sentences.pop()
        at = round(depth * len(sentences))
        context = _paragraphs([*sentences[:at], fact, *sentences[at:]], random.Random(f"{SEED} {name}"))  # noqa: S311
        tokens = count_tokens(LAYOUT.format(context=context, question=question, answer=code))
        if tokens <= length:
            break
    return {
        "id": name,
        "context": context,
        "question": question,
        "answer": code,
        "depth": depth,
        "length": length,
        "tokens": tokens,
    }


def _sentence(chance: random.Random) -> str:
    person, person2 = chance.sample(PEOPLE, 2)
    goods, goods2 = chance.sample(GOODS, 2)
    words = {"person": person, "person2": person2, "goods": goods, "goods2": goods2}
    lists = {"thing": THINGS, "weather": WEATHER, "time": TIMES, "mood": MOODS, "road": ROADS}
    words |= {name: chance.choice(choices) for name, choices in lists.items()}
    words |= {name.capitalize(): words[name][0].upper() + words[name][1:] for name in ("person", "time", "weather")}
    return chance.choice(PATTERNS).format(**words)


def _paragraphs(sentences: list[str], chance: random.Random) -> str:
    paragraphs = []
    while sentences:
        size = chance.randint(*PARAGRAPH)
        paragraphs.append(" ".join(sentences[:size]))
        sentences = sentences[size:]
    return "\n".join(paragraphs)


def embedded_token_count() -> Callable[[str], int]:
    """Return the function that counts tokens of the embedded model."""
    tokenizer = load_model().tokenizer
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


if __name__ == "__main__":
    default = Path(__file__).with_name("data") / "retrieval.jsonl"
    write_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else default, embedded_token_count())
