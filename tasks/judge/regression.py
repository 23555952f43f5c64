"""A night against an earlier one: what changed, by how much, and whether that is more than chance and tolerance.

Three kinds of measurement are compared in three ways.

- Quality: both nights scored the same tokens, so sequences (or blocks of positions) pair up. Whether their mean difference is
  chance a sign-flip test says (Fisher's randomisation test, 1935): without a change each difference is as likely to have the
  other sign, so the p value holds for however few pairs. How large it is, a percentile bootstrap (Efron and Tibshirani, 1993,
  chapter 13), whose own p value would not: with 7 pairs it is below 1 % by chance six times in a hundred.
- Speed: a night's rounds are ratios to the full cache in the same round. The logarithms of two nights' ratios are compared
  by Welch's t test, only where both nights ran on one class of device.
- Memory: bytes are counted, not sampled. They are compared exactly, as whole numbers.

A regression is a change for the worse which chance does not explain, after control of the false discovery rate over
all sampled comparisons of the night (Benjamini and Hochberg, 1995), and which is larger than what is tolerated. With no
change anywhere, that rate is the chance of any false alarm in a night; it does not cover what differs between nights and
is the same for all rounds of one, which is what the tolerance of speed is for (docs/history.md has the figures).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from pydantic import Field

from kivi.measure.records import Interval
from kivi.measure.results import CellResult, ContextThroughput, MetricField, metric_fields
from tasks.config import Config, Tolerances
from tasks.judge.significance import Estimate, Floats, PairedEstimator, welch

FEWEST_PAIRS = 8  # below, even differences that all have one sign come about by chance with 2 / 2^n > 0.01
FEWEST_ROUNDS = 3
FEWEST_FLIPS = 10_000
# Relative changes are taken of at least this much: below, a cache is as good as exact and its figure is noise of floats.
FLOORS = {"quality.kl_mean": 1e-4, "quality.flip_rate": 0.02}

Outcome = Literal["regression", "improvement", "unchanged", "not compared"]


class Pair(NamedTuple):
    """A cell's result and an earlier one of the same identity; ``against`` names the earlier night in sentences."""

    label: str
    against: str
    now: CellResult
    before: CellResult


class Change(Config):
    """One metric of one cell, now and before. ``change`` and its interval are shares of ``before`` (or of the floor)."""

    cell: str
    cell_key: str
    against: str = Field(description="the earlier night, e.g. the last good night 2026-11-28")
    metric: str = Field(description="name of the metric; speeds with their context, e.g. throughput.decode_ratio@512")
    outcome: Outcome
    sentence: str
    before: float | None = None
    after: float | None = None
    change: float | None = None
    interval: Interval | None = None
    p_value: float | None = Field(None, description="two-sided; None for what is compared exactly")
    adjusted_p: float | None = Field(None, description="after control of the false discovery rate over the night")
    tolerance: float = 0.0
    obstacle: str = Field("", description="why the metric was not compared")


class Comparison(Config):
    """All comparisons of a night, and what could not be compared with what."""

    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    tolerances: Tolerances = Tolerances()

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.outcome == "regression")

    @property
    def improvements(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.outcome == "improvement")

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader should know beside the regressions: what got better, and what was not compared and why."""
        obstacles: dict[str, list[str]] = {}
        for change in self.changes:
            if change.obstacle:
                obstacles.setdefault(change.obstacle, []).append(change.metric.partition("@")[0])
        skipped = (f"{', '.join(sorted(set(metrics)))}: not compared: {why}" for why, metrics in obstacles.items())
        return (*(change.sentence for change in self.improvements), *self.notes, *skipped)


@dataclass(frozen=True)
class _Observed:
    """A metric on both nights, before anything is said about it. One of the last four fields says how it is compared."""

    pair: Pair
    metric: str
    tolerance: float = 0.0
    before: float | None = None
    after: float | None = None
    counts: tuple[int, int] | None = None  # before and after, of what is counted
    differences: Floats | None = None  # of paired samples, as shares of before
    rounds: tuple[Floats, Floats] | None = None  # logarithms of ratios, before and after
    obstacle: str = ""  # why it cannot be compared

    @property
    def is_sampled(self) -> bool:
        return self.differences is not None or self.rounds is not None


def compare(pairs: Sequence[Pair], tolerances: Tolerances, notes: Sequence[str] = ()) -> Comparison:
    """Compare every metric of every pair; what is sampled is judged together.

    Args:
        pairs: Tonight's cells, each beside an earlier result of its own identity.
        tolerances: What is tolerated, the false discovery rate and the seed.
        notes: Sentences about cells that have no earlier result, passed through.
    """
    observed = [metric for pair in pairs for metric in _observe(pair, tolerances)]
    sampled = sum(metric.is_sampled for metric in observed)
    # A lone regression passes Benjamini-Hochberg with p <= rate / tests: the smallest p of drawn signs is a quarter of that.
    flips = max(FEWEST_FLIPS, math.ceil(4 * sampled / tolerances.false_discovery_rate))
    estimator = PairedEstimator(flips, tolerances.seed)
    estimates = [_estimate(metric, estimator) for metric in observed]
    adjusted = iter(_adjust([estimate.p_value for estimate in estimates if estimate.p_value is not None]))
    changes = tuple(
        _judge(metric, estimate, None if estimate.p_value is None else next(adjusted), tolerances)
        for metric, estimate in zip(observed, estimates, strict=True)
    )
    return Comparison(changes=changes, notes=tuple(notes), tolerances=tolerances)


def _adjust(p_values: list[float]) -> list[float]:
    return [float(p) for p in scipy.stats.false_discovery_control(p_values)] if p_values else []


def _observe(pair: Pair, tolerances: Tolerances) -> Iterator[_Observed]:
    now, before = pair.now.quality, pair.before.quality
    yield _observe_samples(pair, "quality.kl_mean", before.sequence_kl, now.sequence_kl, tolerances.kl_mean)
    yield _observe_samples(pair, "quality.flip_rate", before.sequence_flips, now.sequence_flips, tolerances.flip_rate)
    yield _observe_bytes(pair)
    if pair.now.spec.kind != "full":  # its speed is what speeds are ratios to
        yield from _observe_speed(pair, tolerances.speed)


def _observe_samples(pair: Pair, metric: str, before: Sequence[float], after: Sequence[float], tolerance: float) -> _Observed:
    if len(before) != len(after):
        obstacle = f"{len(before)} samples then and {len(after)} now do not pair up"
        return _Observed(pair, metric, obstacle=obstacle)
    if len(after) < FEWEST_PAIRS:
        obstacle = f"{len(after)} samples say nothing about chance, {FEWEST_PAIRS} are the fewest: score more positions"
        return _Observed(pair, metric, obstacle=obstacle)
    old, new = np.asarray(before, np.float64), np.asarray(after, np.float64)
    scale = max(float(old.mean()), FLOORS[metric])
    return _Observed(pair, metric, tolerance, float(old.mean()), float(new.mean()), differences=(new - old) / scale)


def _observe_bytes(pair: Pair) -> _Observed:
    now, before = pair.now.memory, pair.before.memory
    if now.tokens != before.tokens:
        obstacle = f"bytes a token depend on the tokens in the cache, which were {before.tokens} then and are {now.tokens} now"
        return _Observed(pair, "memory.bytes_per_token", obstacle=obstacle)
    return _Observed(
        pair,
        "memory.bytes_per_token",
        before=before.resident_bytes / before.tokens,
        after=now.resident_bytes / now.tokens,
        counts=(before.resident_bytes, now.resident_bytes),
    )


def _observe_speed(pair: Pair, tolerance: float) -> Iterator[_Observed]:
    before, now = _contexts(pair.before), _contexts(pair.now)
    for context in sorted(before.keys() | now.keys()):
        for name in ("prefill_ratio", "decode_ratio"):
            metric = f"throughput.{name}@{context}"
            if context not in before:
                yield _Observed(pair, metric, obstacle="it was not measured then")
            elif context not in now:
                # What was timed and no longer is, on a night of the same settings, is missing: never a pass.
                yield _Observed(pair, metric, tolerance, before=getattr(before[context], name).median)
            else:
                yield _observe_rounds(pair, metric, getattr(before[context], name), getattr(now[context], name), tolerance)


def _observe_rounds(pair: Pair, metric: str, before: Any, after: Any, tolerance: float) -> _Observed:
    device, earlier = pair.now.provenance.device, pair.before.provenance.device
    if device != earlier:
        return _Observed(pair, metric, obstacle=f"it ran on {earlier} then and on {device} now")
    if min(len(before.rounds), len(after.rounds)) < FEWEST_ROUNDS:
        obstacle = f"{len(before.rounds)} rounds then, {len(after.rounds)} now, and {FEWEST_ROUNDS} are the fewest"
        return _Observed(pair, metric, obstacle=obstacle)
    old, new = (np.log(np.asarray(timing.rounds, np.float64)) for timing in (before, after))
    if not (np.ptp(old) or np.ptp(new)):
        return _Observed(pair, metric, obstacle="all rounds are equal, which no clock shows")
    return _Observed(pair, metric, tolerance, math.exp(old.mean()), math.exp(new.mean()), rounds=(old, new))


def _contexts(result: CellResult) -> dict[int, ContextThroughput]:
    return {timing.context: timing for timing in result.throughput.contexts} if result.throughput else {}


def _estimate(metric: _Observed, estimator: PairedEstimator) -> Estimate:
    if metric.differences is not None:
        return estimator.estimate(metric.differences)
    if metric.rounds is not None:
        return welch(*metric.rounds)
    if metric.counts is not None:
        before, after = metric.counts
        return Estimate((after - before) / before)
    return Estimate(math.nan)


def _judge(metric: _Observed, estimate: Estimate, adjusted_p: float | None, tolerances: Tolerances) -> Change:
    field = _FIELDS[metric.metric.partition("@")[0]]
    outcome = _outcome(metric, estimate, adjusted_p, field, tolerances.false_discovery_rate)
    measured = not math.isnan(estimate.change)
    return Change(
        cell=metric.pair.label,
        cell_key=metric.pair.now.cell_key,
        against=metric.pair.against,
        metric=metric.metric,
        outcome=outcome,
        sentence=_sentence(metric, estimate, field, outcome),
        before=metric.before,
        after=metric.after,
        change=estimate.change if measured else None,
        interval=estimate.interval,
        p_value=estimate.p_value,
        adjusted_p=adjusted_p,
        tolerance=metric.tolerance,
        obstacle=metric.obstacle,
    )


def _outcome(metric: _Observed, estimate: Estimate, adjusted_p: float | None, field: MetricField, rate: float) -> Outcome:
    if metric.obstacle:
        return "not compared"
    if metric.after is None:
        return "regression"
    if adjusted_p is not None and adjusted_p > rate:
        return "unchanged"
    if estimate.change == 0 or abs(estimate.change) <= metric.tolerance:
        return "unchanged"
    return "improvement" if (estimate.change > 0) == field.higher_is_better else "regression"


def _sentence(metric: _Observed, estimate: Estimate, field: MetricField, outcome: Outcome) -> str:
    start, against = f"{metric.pair.label}: {metric.metric}", metric.pair.against
    if metric.before is None or metric.obstacle:
        return f"{start} was not compared with {against}: {metric.obstacle}"
    unit = "" if field.unit == "1" else f" {field.unit}"
    if metric.after is None:
        return f"{start} is missing, and was {metric.before:.6g}{unit} on {against}"
    values = f"from {metric.before:.6g} to {metric.after:.6g}{unit} since {against}"
    if outcome == "unchanged":
        return f"{start} did not change by more than chance and tolerance, {values}"
    verb = "rose" if estimate.change > 0 else "fell"
    if estimate.interval is None:
        return f"{start} {verb} {values}; any {'increase' if outcome == 'regression' else 'decrease'} counts"
    low, high = sorted((abs(estimate.interval.low), abs(estimate.interval.high)))
    return (
        f"{start} {verb} by {abs(estimate.change):.1%} (95 % interval {low:.1%} to {high:.1%}), {values}; "
        f"{metric.tolerance:.0%} is tolerated"
    )


_FIELDS = {field.name: field for field in metric_fields()}
