"""A fact planted in a long text: right when it is said in the first line, as a whole word or number."""

from __future__ import annotations

import re

STOPS = ("\n",)


def score(answer: str, text: str) -> float:
    """Return 1 when ``text`` has ``answer`` in it, else 0.

    Letter case does not count, and 2069 is not in 20691, 1,2069 or 2069.5.
    """
    whole = rf"(?<!\w)(?<!\d[.,]){re.escape(answer.strip())}(?!\w)(?![.,]\d)"
    return float(re.search(whole, text, re.IGNORECASE) is not None)
