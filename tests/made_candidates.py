"""Candidates of a tuning that no machine measured, for tests of its answer and of its pages."""

from __future__ import annotations

from typing import Any

from kivi.measure.candidate import Candidate
from kivi.measure.records import Interval
from kivi.measure.results import Quality
from kivi.spec import CacheSpec


def quality(kl: float, flips: float = 0.0, spread: float = 0.0) -> Quality:
    """Return a quality whose KL has an interval of ``spread`` to both sides, and whose flips one of half as much again."""
    return Quality(
        kl_mean=kl,
        kl_median=kl,
        kl_p99=kl,
        kl_max=kl,
        flip_rate=flips,
        perplexity=2,
        perplexity_full=2,
        coverage=1,
        positions=100,
        sequences=1,
        kl_interval=Interval(low=kl * (1 - spread), high=kl * (1 + spread), method="made up"),
        flip_interval=Interval(low=flips, high=flips * 1.5, method="made up"),
    )


def candidate(spec: str, size: float, kl: float, family: Any = "uniform", **fields: float) -> Candidate:
    """Return a candidate of ``size`` bytes a token; ``fields`` are those of :func:`quality`."""
    return Candidate(
        cell_key=spec,
        family=family,
        spec=CacheSpec.parse(spec),
        quality=quality(kl, **fields),
        bits=3,
        bytes_per_token=size,
        context=4096,
        seconds=1,
    )
