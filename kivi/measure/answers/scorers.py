"""Scorers, by name: how right a text is, from 0 to 1, given the right answer, and where such a text ends."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from decimal import Decimal
from statistics import fmean
from typing import Literal, NamedTuple

ScorerName = Literal["planted_fact", "planted_facts", "exact_answer", "json_values", "text_agreement"]

MARK = "####"  # before the answer in GSM8K (arXiv:2110.14168)
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
TOKEN = re.compile(r"\w+|[^\w\s]")


class Scorer(NamedTuple):
    """A pure function of the right answer and of a text, and the strings that end such a text."""

    score: Callable[[str, str], float]
    stops: tuple[str, ...]

    def cut(self, text: str) -> str:
        """Return ``text`` up to the first stop after its first visible character."""
        start = len(text) - len(text.lstrip())
        return text[: min((at for stop in self.stops if (at := text.find(stop, start)) >= 0), default=len(text))]


def score_fact(answer: str, text: str) -> float:
    """Return 1 when ``text`` has ``answer`` in it as a whole word or number, else 0.

    Letter case does not count, and 2069 is not in 20691, 1,2069 or 2069.5.
    """
    whole = rf"(?<!\w)(?<!\d[.,]){re.escape(answer.strip())}(?!\w)(?![.,]\d)"
    return float(re.search(whole, text, re.IGNORECASE) is not None)


def score_facts(answer: str, text: str) -> float:
    """Return the share of the parts of ``answer``, which ``", "`` joins, that are in ``text`` (RULER's string_match_all)."""
    return fmean(score_fact(part, text) for part in answer.split(", "))


def score_json(answer: str, text: str) -> float:
    """Return 1 when ``text`` is ``answer``, or its first object of JSON has the fields, values and types of it, else 0."""
    if text.strip() == answer.strip():
        return 1.0
    try:
        found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
        expected = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    return float(json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True))  # 1 is neither true nor 1.0


def score_number(answer: str, text: str) -> float:
    """Return 1 when the numbers of ``answer`` and ``text`` are equal (1,000.0 is 1000), else 0; without a number it is 0."""
    expected = _number(answer)
    return float(expected is not None and _number(text) == expected)


def score_agreement(answer: str, text: str) -> float:
    """Return ``2 M / (a + t)``: M matching words and signs of the a in ``answer`` and the t in ``text``; 1 when all match.

    It is no pass rate: a right function that is written differently scores low. Code is never run.
    """
    return difflib.SequenceMatcher(None, TOKEN.findall(answer), TOKEN.findall(text), autojunk=False).ratio()


def _number(text: str) -> Decimal | None:
    """Return the first number after the last mark; without a mark, as in lm-evaluation-harness, the last one; else None."""
    _, mark, end = text.rpartition(MARK)
    found = NUMBER.findall(end)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", ""))


SCORERS: dict[ScorerName, Scorer] = {
    "planted_fact": Scorer(score_fact, ("\n",)),
    "planted_facts": Scorer(score_facts, ("\n",)),
    "json_values": Scorer(score_json, ("\n",)),
    "exact_answer": Scorer(score_number, ("\nQuestion:", "\nQ:")),  # where a model goes on with a question of its own
    # HumanEval's stops (arXiv:2107.03374, section 2.1): the function is over
    "text_agreement": Scorer(score_agreement, ("\nclass", "\ndef", "\n#", "\nif", "\nprint")),
}
