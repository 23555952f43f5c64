"""Generated tasks: each text holds what its answer says, found by a reader of its own; length, seed and order are kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from kivi.measure.answers.scorers import SCORERS
from tasks.config import GENERATED, PromptSetConfig
from tasks.prompts.prompt_sets import PromptSetError, load_prompt_set
from tasks.prompts.synthetic import TASKS, count_tokens, make_rows

LENGTH = 1024
NEEDLES = [name for name in GENERATED if name.startswith("niah")]


def solve(name: str, prompt: str) -> str:
    """Return the answer that a careful reader of the prompt gives."""
    context, _, question = prompt.rpartition("\n")
    match name:
        case _ if name in NEEDLES:
            asked = re.split(r", | and ", question.partition("codes of ")[2].partition(" in the text")[0])
            facts = re.findall(r"One of the codes of (\S+) is (\S+)\.\n?", context)
            return ", ".join(value for key in asked for fact_of, value in facts if fact_of == key)
        case "vt":
            values: dict[str, str] = {}
            for variable, source in re.findall(r"VAR (\w+) = (\w+)", context):
                values[variable] = values.get(source, source)
            wanted = question.rpartition("value ")[2].removesuffix(" are:")
            return ", ".join(variable for variable, value in values.items() if value == wanted)
        case "cwe" | "fwe":
            listed = context.partition("\n")[2]
            words = re.findall(r"\d+\. (\S+)", listed) if name == "cwe" else listed.split()
            return ", ".join(word for word, _ in Counter(words).most_common(10 if name == "cwe" else 3))
        case "schema":
            order = re.search(r"Write the order (\S+)", prompt)
            assert order is not None
            (found,) = re.findall(rf"Order ({order[1]}) is for (\d+) pieces of (\w+ \w+) and is (not )?paid", prompt)
            return json.dumps({"order": found[0], "item": found[2], "amount": int(found[1]), "paid": not found[3]})
        case "copying":
            owner = re.search(r"Copy the identifier of the (\w+)", prompt)
            assert owner is not None
            return re.findall(rf"The identifier of the {owner[1]} is (\S+)\.", prompt)[0]
        case _:
            last = re.search(r"How many stones does the (\w+) box", prompt)
            assert last is not None
            held: dict[str, int] = {}
            for box, what in re.findall(r"The (\w+) box holds (.+)\.", prompt):
                number, kind, *rest = what.split()
                sign = {"stones": 0, "more": 1, "fewer": -1}[kind]
                held[box] = int(number) if not sign else held[rest[2]] + sign * int(number)
            return str(held[last[1]])


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return {name: list(make_rows(name, LENGTH, 0, 6)) for name in TASKS}


def test_every_task_can_be_named_in_a_matrix() -> None:
    assert set(TASKS) == set(GENERATED)
    assert len(TASKS) >= 12


@pytest.mark.parametrize("name", GENERATED)
def test_a_reader_finds_the_answer_in_the_text(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows[name]:
        found = solve(name, row["text"].removesuffix(row["answer"]).rstrip())
        if name in ("cwe", "fwe"):
            assert sorted(found.split(", ")) == sorted(row["answer"].split(", "))
        else:
            assert found == row["answer"]


@pytest.mark.parametrize("name", GENERATED)
def test_texts_fill_their_length_and_differ(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows[name]:
        assert row["tokens"] == count_tokens(row["text"]) <= LENGTH
        assert row["tokens"] > 0.9 * LENGTH
    assert len({row["text"] for row in rows[name]}) == len({row["answer"] for row in rows[name]}) == 6


@pytest.mark.parametrize("name", ["niah_single_2", "cwe"])
def test_rows_are_those_of_seed_and_length_and_a_shorter_set_begins_a_longer_one(
    name: str, rows: dict[str, list[dict[str, Any]]]
) -> None:
    assert list(make_rows(name, LENGTH, 0, 3)) == rows[name][:3]
    assert not {row["answer"] for row in make_rows(name, LENGTH, 1, 3)} & {row["answer"] for row in rows[name]}


def test_a_fact_stands_as_deep_as_its_row_says(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows["niah_single_2"]:
        start = row["text"].index("One of the codes") / len(row["text"])
        assert abs(start - row["depth"]) < 0.1
    assert rows["vt"][0]["depth"] is None


def test_a_generated_set_is_a_prompt_set_like_any_other() -> None:
    found = load_prompt_set(PromptSetConfig(source="vt", length=512, seed=3, limit=2))
    assert (found.name, len(found.rows), found.note) == ("vt", 2, "the first 2 of 2 rows")
    assert [question.answer.count(", ") for question in found.questions()] == [4, 4]
    assert found.revision is not None and found.revision.startswith("synthetic 1, wonderwords ")
    assert load_prompt_set(PromptSetConfig(source="vt", length=512, seed=4, limit=2)).sha256 != found.sha256


def test_what_cannot_be_is_one_sentence() -> None:
    with pytest.raises(PromptSetError, match=r"prompt set 'cwe': a text of cwe takes \d{3} tokens at least, and length=64"):
        load_prompt_set(PromptSetConfig(source="cwe", length=64))
    with pytest.raises(ValidationError, match="length cannot be chosen for 'humaneval', which is not a generated task"):
        PromptSetConfig(source="humaneval", length=64)


@pytest.mark.parametrize(
    ("scorer", "answer", "text", "score"),
    [
        ("planted_facts", "12, 34", " 12 and 34.", 1.0),
        ("planted_facts", "12, 34", " 12, 345", 0.5),
        ("json_values", '{"a": 1, "b": true}', 'Sure: {"b": true, "a": 1} as asked', 1.0),
        ("json_values", '{"a": 1, "b": true}', '{"a": 1, "b": 1}', 0.0),
        ("json_values", '{"a": 1}', '{"a": 1, "c": 2}', 0.0),
        ("json_values", '{"a": 1}', '{"a": 1', 0.0),
        ("json_values", '{"a": 1}', "none", 0.0),
    ],
)
def test_scorers_of_lists_and_of_json(scorer: Any, answer: str, text: str, score: float) -> None:
    assert SCORERS[scorer].score(answer, text) == score
