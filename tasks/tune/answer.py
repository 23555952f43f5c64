"""The answer of a tuning: the Pareto front, and which cache to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import AwareDatetime, Field, NonNegativeFloat

from kivi.measure.candidate import Candidate
from kivi.measure.pareto import pareto
from kivi.measure.records import Record, Text
from kivi.measure.results import Quality
from kivi.measure.sensitivity import Sensitivity
from tasks.config import DEFAULT_THRESHOLDS
from tasks.judge.gate import TIERS, Tier, standing
from tasks.tune.config import Budget, TuneConfig

BOUNDS = DEFAULT_THRESHOLDS["*"].tiers
RECOMMENDED = "recommended.yaml"


class TuneError(RuntimeError):
    """A tuning without an answer; one sentence says why, with the numbers."""


class Recommendation(Record):
    """One cache, and what it is recommended for."""

    aim: Text
    slug: Text
    sentence: Text

    @property
    def word(self) -> str:
        """The aim in a word: good, marginal, KL or bytes."""
        return self.aim.split()[0]


class Tuning(Record):
    """Everything that a tuning measured, and its answer."""

    kind: Literal["kivi-tuning"] = "kivi-tuning"
    digest: str
    started: AwareDatetime
    seconds: NonNegativeFloat
    model: Text
    model_dtype: str
    weights_bytes: int
    calibration: str
    judged: str
    config: TuneConfig
    sensitivities: list[Sensitivity]
    candidates: list[Candidate]
    failed: dict[str, str] = Field({}, description="by slug, why a candidate could not be measured")
    recommendations: list[Recommendation]
    decode_ratio: dict[str, float | None] = Field({}, description="of the recommended caches, by slug")
    device: str
    blas: str
    packages: dict[str, str]
    git_sha: str
    git_dirty: bool

    @property
    def passed(self) -> bool:
        return bool(self.recommendations)

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        first = self.recommendations[0]
        return f"recommended: {first.sentence}"

    def candidate(self, slug: str) -> Candidate:
        """Return the candidate of a slug."""
        return next(one for one in self.candidates if one.spec.slug == slug)


def promised_tier(quality: Quality) -> Tier:
    """Return the tier that a cache has even at the upper ends of the intervals of mean KL and flips."""
    ends = {"kl_mean": quality.kl_interval, "flip_rate": quality.flip_interval}
    return standing(quality.model_copy(update={name: end.high for name, end in ends.items() if end is not None}), BOUNDS).tier


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those that no other beats in bytes and KL, by bytes."""
    return pareto(candidates, lambda one: (one.bytes_per_token, one.quality.kl_mean))


def bytes_budget(config: TuneConfig, weights: int) -> float | None:
    """Return the most bytes a token that the budget leaves; None where it is no budget of bytes.

    Raises:
        TuneError: the memory does not hold the weights.
    """
    if config.memory is None:
        return config.bytes_per_token
    left = config.memory - weights
    if left <= 0:
        raise TuneError(
            f"memory={config.memory:,}: the weights of {config.model.name!r} alone take {weights:,} bytes: give more memory"
        )
    return left / (config.context * config.batch)


def choose(config: TuneConfig, candidates: Sequence[Candidate], weights: int) -> dict[str, Candidate]:
    """Return what to take, by what for: the best within the budget, or the smallest of each tier but the last.

    Raises:
        TuneError: no candidate is within the budget.
    """
    best = front(candidates)
    budget: Budget | None = config.budget
    if budget is None:
        found: dict[str, Candidate] = {}
        for wanted in TIERS[:-1]:
            reached = [one for one in best if TIERS.index(promised_tier(one.quality)) <= TIERS.index(wanted)]
            if reached and reached[0] not in found.values():
                found[wanted] = reached[0]
        return found
    if budget == "kl":
        within = [one for one in best if config.kl is not None and one.quality.kl_mean <= config.kl]
        if not within:
            closest = best[-1]
            raise TuneError(
                f"kl={config.kl:g}: no setting has so small a KL; the best, {closest.spec.text}, has "
                f"{closest.quality.kl_mean:.2g} nats at {closest.bytes_per_token:,.0f} bytes a token"
            )
        return {f"KL at most {config.kl:g}": within[0]}
    most = bytes_budget(config, weights) or 0.0
    require_room(config, most, best[0].bytes_per_token)
    return {f"bytes a token at most {most:,.0f}": [one for one in best if one.bytes_per_token <= most][-1]}


def require_room(config: TuneConfig, most: float, smallest: float) -> None:
    """Refuse a budget below the smallest setting.

    Raises:
        TuneError: it is.
    """
    if most < smallest:
        what = f"bytes_per_token={most:,.0f}" if config.memory is None else f"memory={config.memory:,}"
        raise TuneError(
            f"{what}: leaves {most:,.0f} bytes a token for {config.batch} × {config.context} tokens, and the smallest setting "
            f"takes {smallest:,.0f}: allow more, or a shorter context"
        )


def recommend(aim: str, one: Candidate, candidates: Sequence[Candidate], decode: float | None) -> Recommendation:
    """Say what one cache is, with its numbers and the nearest of mlx-lm's caches."""
    quality = one.quality
    interval = f" ({quality.kl_interval.low:.2g} to {quality.kl_interval.high:.2g})" if quality.kl_interval else ""
    speed = f", decodes at {decode:.2f} times the full cache's speed" if decode is not None else ""
    sentence = (
        f"{aim}: {one.spec.text} takes {one.bytes_per_token:,.0f} bytes a token at {one.context:,} tokens "
        f"({one.bits:.2f} bits a number), KL {quality.kl_mean:.2g}{interval} nats, {quality.flip_rate:.1%} flips{speed}"
    )
    beside = [other for other in candidates if other.family == "mlx-lm" and other.quality.kl_mean <= quality.kl_mean]
    if beside:
        nearest = min(beside, key=lambda other: other.bytes_per_token)
        sentence += f"; mlx-lm's smallest with no more KL takes {nearest.bytes_per_token:,.0f}"
    return Recommendation(aim=aim, slug=one.spec.slug, sentence=sentence)
