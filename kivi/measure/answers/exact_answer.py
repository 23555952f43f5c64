"""A number that is the end of a chain of thought, as in GSM8K (arXiv:2110.14168), whose answers end with ``#### 18``.

As lm-evaluation-harness does it: the number after ``####``, and where a text has no such mark, its last number.
"""

from __future__ import annotations

import re
from decimal import Decimal

STOPS = ("\nQuestion:", "\nQ:")  # where a model goes on with a question of its own
MARK = "####"
NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def score(answer: str, text: str) -> float:
    """Return 1 when the numbers of ``answer`` and ``text`` are equal (1,000.0 is 1000), else 0; without a number it is 0."""
    expected = number(answer)
    return float(expected is not None and number(text) == expected)


def number(text: str) -> Decimal | None:
    """Return the first number after the last mark, else the last number of ``text``; None where there is none."""
    _, mark, end = text.rpartition(MARK)
    found = NUMBER.findall(end)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", ""))
