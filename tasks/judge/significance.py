"""Whether a change is more than chance: paired samples by a sign-flip test and a bootstrap, rounds by Welch's t test."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import scipy

from kivi.measure.records import Interval

CONFIDENCE = 0.95
RESAMPLES = 10_000  # of the bootstrap
EXACT_PAIRS = 14  # up to here all 2^n signs are looked at, from there on as many as are drawn

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Estimate(NamedTuple):
    """A change as a share of what was before, its 95 % interval, and the two-sided p value of no change."""

    change: float
    interval: Interval | None = None
    p_value: float | None = None


class PairedEstimator:
    """Estimates means of paired differences with draws that all of as many samples share, since their seed is one.

    Args:
        flips: Signs of all pairs that are drawn, where there are too many to look at each.
        seed: Of all draws.
    """

    def __init__(self, flips: int, seed: int) -> None:
        self._flips, self._seed = flips, seed
        self._drawn: dict[int, np.ndarray[Any, np.dtype[np.uint16]]] = {}

    def estimate(self, differences: Floats) -> Estimate:
        """Return the mean of ``differences``, its percentile interval, and the p value of the sign-flip test."""
        if not differences.any():
            return Estimate(0.0, Interval(low=0.0, high=0.0, method=f"all {differences.size} pairs are equal"), 1.0)
        means = self._draws(differences.size) @ (differences / differences.size)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        method = f"percentile bootstrap, {RESAMPLES} resamples of {differences.size} pairs, seed {self._seed}"
        interval = Interval(low=float(low), high=float(high), method=method)
        return Estimate(float(differences.mean()), interval, sign_flip_p(differences, self._flips, self._seed))

    def _draws(self, count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Return how often each of ``count`` samples is drawn, ``[RESAMPLES, count]``."""
        if count not in self._drawn:
            generator = np.random.default_rng(self._seed)
            even = np.full(count, 1 / count)
            self._drawn[count] = generator.multinomial(count, even, size=RESAMPLES).astype(np.uint16)
        return self._drawn[count]


def sign_flip_p(differences: Floats, flips: int, seed: int) -> float:
    """Return the chance of a mean as far from zero as that of ``differences``, if each were as likely to have the other sign.

    It is exact up to ``EXACT_PAIRS`` differences. Above, the observed signs count as one draw more, ``(k + 1) / (m + 1)``, so
    that few draws make it larger, never too small.

    Args:
        differences: One for each pair, ``[pairs]``.
        flips: Signs of all pairs that are drawn, where there are too many to look at each.
        seed: Of the draws.
    """
    # What other signs come to equally is reached, too, in whatever order it was added.
    reached = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    if differences.size <= EXACT_PAIRS:
        return float(np.mean(np.abs(_signed_sums(differences)) >= reached))
    # SciPy's permutation_test does the same with an array of flips x pairs: an hour for full.yaml. Sums of eight are looked up.
    generator, sums = np.random.default_rng(seed), np.zeros(flips)
    for start in range(0, differences.size, 8):
        eight = _signed_sums(differences[start : start + 8])
        sums += eight[generator.integers(eight.size, size=flips)]
    return float((np.sum(np.abs(sums) >= reached) + 1) / (flips + 1))


def _signed_sums(differences: Floats) -> Floats:
    """Return the sum of ``differences`` with each of the ``2 ** pairs`` signs."""
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums - difference, sums + difference])
    return sums


def welch(before: Floats, after: Floats) -> Estimate:
    """Return the change of the geometric mean; ``before`` and ``after`` are logarithms."""
    test = scipy.stats.ttest_ind(after, before, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    low, high = (math.expm1(float(bound)) for bound in (interval.low, interval.high))
    method = f"Welch's t interval of log ratios, {before.size} and {after.size} rounds"
    change = math.expm1(float(after.mean() - before.mean()))
    return Estimate(change, Interval(low=low, high=high, method=method), float(test.pvalue))
