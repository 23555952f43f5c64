"""Prompt sets that are made from a seed: tasks with right answers, offline, at the length that a configuration gives.

A task writes its text around any number of filler units; a row takes as many as fit into the length. Tokens are counted with
the embedded model's tokenizer, so that a set is the same whatever model reads it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import random
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any

from kivi.models import load_model
from tasks.prompts.records import arithmetic, copying, schema
from tasks.prompts.ruler import RULER
from tasks.prompts.task import Draft, Task

VERSION = 1  # raise it when a task changes
LENGTH = 2048  # of a set for which none is chosen
ROWS = 100  # of a set without a limit
TASKS: dict[str, Task] = {**RULER, "schema": schema, "copying": copying, "arithmetic": arithmetic}


class LengthError(ValueError):
    """A length that a task does not fit into."""


def revision() -> str:
    """Return what decides of every row, beside name, length and seed."""
    return f"synthetic {VERSION}, wonderwords {importlib.metadata.version('wonderwords')}"


def make_rows(name: str, length: int, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first ``count`` rows ``id, text, answer, depth, tokens`` of a task; a longer set begins with a shorter one.

    Args:
        name: Of the task, a key of :data:`TASKS`.
        length: Most tokens of a text, its answer included.
        seed: Of everything that is drawn.
        count: Rows.

    Raises:
        LengthError: the task takes more tokens than ``length`` without any filler.
    """
    for index in range(count):
        chance = random.Random(f"{name} {length} {seed} {index}")  # noqa: S311 - texts, not secrets
        draft = TASKS[name](chance)
        text = _longest(draft, length)
        if text is None:
            needed = count_tokens(_text(draft, 0))
            raise LengthError(f"a text of {name} takes {needed} tokens at least, and length={length}")
        yield {
            "id": f"{name}-{length}-{seed}-{index}",
            "text": text,
            "answer": draft.answer,
            "depth": draft.depth,
            "tokens": count_tokens(text),
        }


def count_tokens(text: str) -> int:
    """Return how many tokens of the embedded model a text has, without special ones."""
    tokens: list[int] = _tokenizer().encode(text, add_special_tokens=False)
    return len(tokens)


@cache
def _tokenizer() -> Any:
    return load_model().tokenizer


def _text(draft: Draft, units: int) -> str:
    return f"{draft.write(units)} {draft.answer}"


def _longest(draft: Draft, length: int) -> str | None:
    """Return the longest text of at most ``length`` tokens; None if there is none."""

    def fits(units: int) -> bool:
        return count_tokens(_text(draft, units)) <= length

    if not fits(0):
        return None
    above = next(units for units in (2**power for power in itertools.count()) if not fits(units))
    first_too_many = bisect_left(range(above), True, lo=above // 2, key=lambda units: not fits(units))
    return _text(draft, first_too_many - 1)
