"""Write the prompt set ``retrieval``: long texts with one planted fact each, and a question about it.

    python -m tasks.prompts.retrieval [FILE]

The texts are the log of a harbour town that does not exist, put together from the words and sentence patterns of
data/retrieval_words.yaml by a seeded generator: readable, without third-party text, and without any number of four digits but
the planted one. Every length from 512 to 4,096 tokens of the embedded model is written with the fact at five depths, three
texts each. The file that comes with the project is this script's output, byte for byte.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from kivi.models import load_model

SEED = 2402_02750  # the number of the KIVI paper on arXiv
LENGTHS = (512, 1024, 2048, 4096)  # tokens of the whole text, question and answer included, at most
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where the fact stands, as a share of the sentences
TEXTS = 3  # at each length and depth
PARAGRAPH = (4, 8)  # sentences, from and to

FACT = "The access code of the {place} is {code}."
QUESTION = "What is the access code of the {place}?"
LAYOUT = "{context}\n\nQuestion: {question}\nAnswer: {answer}"

WORDS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("data").joinpath("retrieval_words.yaml").read_text())


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
    locations = [f"{side} {place}" for side in WORDS["sides"] for place in WORDS["places"]]
    chance.shuffle(locations)
    for text in range(TEXTS):
        for depth in DEPTHS:
            for length in LENGTHS:
                place, code = locations.pop(), str(chance.randint(1000, 9999))
                yield _row(f"{length}-{depth:g}-{text}", place, code, length, depth, chance, count_tokens)


def _row(
    name: str, place: str, code: str, length: int, depth: float, chance: random.Random, count_tokens: Callable[[str], int]
) -> dict[str, str | int | float]:
    fact, question = FACT.format(place=place, code=code), QUESTION.format(place=place)
    sentences: list[str] = []
    room = length - count_tokens(LAYOUT.format(context=fact, question=question, answer=code))
    while room > 0:
        sentences.append(sentence(chance))
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


def sentence(chance: random.Random) -> str:
    """Return one sentence about the town, drawn."""
    person, person2 = chance.sample(WORDS["people"], 2)
    goods, goods2 = chance.sample(WORDS["goods"], 2)
    words = {"person": person, "person2": person2, "goods": goods, "goods2": goods2}
    lists = {"thing": "things", "weather": "weather", "time": "times", "mood": "moods", "road": "roads"}
    words |= {name: chance.choice(WORDS[choices]) for name, choices in lists.items()}
    words |= {name.capitalize(): words[name][0].upper() + words[name][1:] for name in ("person", "time", "weather")}
    return chance.choice(WORDS["patterns"]).format(**words)


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
