"""The retrieval set: what the script writes is what is committed, and every question has its one answer in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.config import PromptSetConfig
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.prompts.retrieval import DEPTHS, LENGTHS, TEXTS, embedded_token_count, write_rows
from tasks.prompts.sources import DATA


@pytest.fixture(scope="module")
def count_tokens() -> Callable[[str], int]:
    return embedded_token_count()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "retrieval.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_script_writes_the_committed_file_byte_for_byte(tmp_path: Path, count_tokens: Callable[[str], int]) -> None:
    write_rows(tmp_path / "retrieval.jsonl", count_tokens)
    written = (tmp_path / "retrieval.jsonl").read_bytes()
    assert written == (DATA / "retrieval.jsonl").read_bytes()
    assert len(written) < 1_000_000


def test_each_answer_stands_once_in_its_text_and_is_its_only_number(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert re.findall(r"\d+", row["context"]) == [row["answer"]]
        place = row["question"].removeprefix("What is the access code of the ").removesuffix("?")
        assert f"The access code of the {place} is {row['answer']}." in row["context"]


def test_every_length_has_every_depth_and_each_place_is_asked_once(rows: list[dict[str, Any]]) -> None:
    cells = [(row["length"], row["depth"]) for row in rows]
    assert {cell: cells.count(cell) for cell in set(cells)} == {
        (length, depth): TEXTS for length in LENGTHS for depth in DEPTHS
    }
    assert len({row["question"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)


def test_texts_are_as_long_as_they_say_and_facts_as_deep(
    rows: list[dict[str, Any]], count_tokens: Callable[[str], int]
) -> None:
    texts = load_prompt_set(PromptSetConfig(source="retrieval")).texts()
    for row, text in zip(rows, texts, strict=True):
        assert count_tokens(text) == row["tokens"]
        assert row["length"] - 64 < row["tokens"] <= row["length"]
        assert text.endswith(f"\n\nQuestion: {row['question']}\nAnswer: {row['answer']}")
        start = row["context"].index("The access code")
        assert abs(start / len(row["context"]) - row["depth"]) < 0.1


def test_a_limit_keeps_all_lengths(rows: list[dict[str, Any]]) -> None:
    assert {row["length"] for row in rows[: len(LENGTHS)]} == set(LENGTHS)
    assert load_prompt_set(PromptSetConfig(source="retrieval", limit=len(LENGTHS))).rows[3]["answer"] == rows[3]["answer"]
