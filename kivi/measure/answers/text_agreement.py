"""How much of the right text is there, token by token: for HumanEval's functions (arXiv:2107.03374), which are never run.

It is no pass rate: a right function that is written differently scores low. It says how near a cache stays to the given text.
"""

from __future__ import annotations

import difflib
import re

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # those of the paper, section 2.1: the function is over
TOKEN = re.compile(r"\w+|[^\w\s]")


def score(answer: str, text: str) -> float:
    """Return ``2 M / (a + t)``: M matching words and signs of the a in ``answer`` and the t in ``text``; 1 when all match."""
    return difflib.SequenceMatcher(None, TOKEN.findall(answer), TOKEN.findall(text), autojunk=False).ratio()
