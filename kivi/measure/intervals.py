"""95 % confidence intervals, each saying how it was made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy

from kivi.measure.records import Interval

CONFIDENCE = 0.95
RESAMPLES = 2000
ENOUGH_SEQUENCES = 20  # from here on sequences are resampled, which are independent; before, blocks of positions
BLOCK = 32  # positions: neighbours share their history, blocks of a group's length much less

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def samples(values: Sequence[Floats]) -> tuple[list[float], str]:
    """Return the means that are resampled, in order, and what they are over.

    Args:
        values: One array of positions a sequence; some may be empty.
    """
    if len(values) >= ENOUGH_SEQUENCES:
        return [float(np.mean(part)) for part in values if part.size], "sequences"
    blocks = [block for part in values if part.size for block in np.array_split(part, max(1, round(part.size / BLOCK)))]
    return [float(np.mean(block)) for block in blocks], f"blocks of {BLOCK} positions"


def bootstrap_interval(means: Sequence[float], over: str, seed: int) -> Interval | None:
    """Return the percentile bootstrap interval of the mean of ``means``; None for fewer than two."""
    if len(means) < 2:
        return None
    method = f"percentile bootstrap, {RESAMPLES} resamples of {len(means)} {over}"
    result = scipy.stats.bootstrap(
        (np.asarray(means),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Interval(low=float(result.confidence_interval.low), high=float(result.confidence_interval.high), method=method)


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the geometric mean of paired ratios; None for fewer than three.

    Ratios multiply, so their logarithms are averaged.
    """
    if len(ratios) < 3:
        return None
    logs = np.log(ratios)
    middle = float(np.mean(logs))
    reach = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1) * scipy.stats.sem(logs))
    method = f"t interval of {len(ratios)} paired log ratios"
    return Interval(low=math.exp(middle - reach), high=math.exp(middle + reach), method=method)
