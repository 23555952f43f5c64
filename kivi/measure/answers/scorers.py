"""Scorers: how right a text is, from 0 to 1, given the right answer. One file a scorer, found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from kivi.measure.answers import exact_answer, planted_fact, text_agreement

ScorerName = Literal["planted_fact", "exact_answer", "text_agreement"]


class Scorer(NamedTuple):
    """A pure function of the right answer and of a text, and the strings that end such a text."""

    score: Callable[[str, str], float]
    stops: tuple[str, ...]

    def cut(self, text: str) -> str:
        """Return ``text`` up to the first stop; what comes before the first visible character ends nothing."""
        start = len(text) - len(text.lstrip())
        return text[: min((at for stop in self.stops if (at := text.find(stop, start)) >= 0), default=len(text))]


SCORERS: dict[ScorerName, Scorer] = {
    "planted_fact": Scorer(planted_fact.score, planted_fact.STOPS),
    "exact_answer": Scorer(exact_answer.score, exact_answer.STOPS),
    "text_agreement": Scorer(text_agreement.score, text_agreement.STOPS),
}
