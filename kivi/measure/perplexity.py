"""The statistics of ``llama-perplexity --kl-divergence`` (llama.cpp, tools/perplexity/README.md), from the same positions.

Losses are ``-log p`` of the next token, in nats, one a position, with the full cache and with this one. Errors are standard
errors of positions taken for independent, as there; intervals that allow for neighbours are :class:`Quality`'s.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field, NonNegativeFloat

from kivi.measure.intervals import Floats
from kivi.measure.records import Record

PERCENTS = (0.1, 1, 5, 10, 50, 90, 95, 99, 99.9)


class Estimate(Record):
    """A mean and its standard error."""

    value: float
    error: NonNegativeFloat

    def __str__(self) -> str:
        return f"{self.value:.6f} ± {self.error:.6f}"

    def percent(self) -> str:
        return f"{100 * self.value:.3f} ± {100 * self.error:.3f} %"


class Percentiles(Record):
    """Values by percent, as ``"99.9"``, in ascending order."""

    minimum: float
    maximum: float
    by_percent: dict[str, float]

    def named(self) -> list[tuple[str, float]]:
        """Return name and value of each, largest first."""
        middle = [("Median" if name == "50" else f"{name}%", value) for name, value in reversed(self.by_percent.items())]
        return [("Maximum", self.maximum), *middle, ("Minimum", self.minimum)]


class PerplexityStatistics(Record):
    """What llama-perplexity says of a quantised model, of this cache."""

    log_ratio: Estimate = Field(description="of ln(perplexity / perplexity_full)")
    ratio: Estimate = Field(description="of perplexity / perplexity_full")
    correlation: float | None = Field(ge=-1, le=1, description="of the two losses, position by position")
    probability_change: Estimate = Field(description="of the next token's probability, this cache's minus the full one's")
    probability_change_rms: Estimate = Field(description="root of the mean square of that change")
    probability_change_percentiles: Percentiles
    kl: Estimate
    kl_percentiles: Percentiles


def statistics(kl: Floats, loss: Floats, loss_full: Floats) -> PerplexityStatistics | None:
    """Return the statistics over at least two positions; None where there is one.

    Args:
        kl: KL(full || this cache) of each position, nats.
        loss: Loss of each position with this cache, nats.
        loss_full: The same with the full cache.
    """
    kl, loss, loss_full = (np.asarray(values, np.float64).ravel() for values in (kl, loss, loss_full))
    if kl.size < 2:
        return None
    log_ratio = _mean(loss - loss_full)
    ratio = float(np.exp(log_ratio.value))
    change = np.exp(-loss) - np.exp(-loss_full)
    squares = _mean(change**2)
    rms = float(np.sqrt(squares.value))
    spreads = loss.std() * loss_full.std()
    return PerplexityStatistics(
        log_ratio=log_ratio,
        ratio=Estimate(value=ratio, error=ratio * log_ratio.error),
        correlation=float(np.clip(np.cov(loss, loss_full, ddof=0)[0, 1] / spreads, -1, 1)) if spreads > 0 else None,
        probability_change=_mean(change),
        probability_change_rms=Estimate(value=rms, error=squares.error / (2 * rms) if rms else 0.0),
        probability_change_percentiles=_percentiles(change),
        kl=_mean(kl),
        kl_percentiles=_percentiles(kl),
    )


def show(figures: PerplexityStatistics, *, perplexity: float, perplexity_full: float, flip_rate: float) -> str:
    """Return the figures as lines of text, named as llama-perplexity names them: Q is this cache, base the full one."""
    rows = [
        ("Mean PPL(Q)", f"{perplexity:.6f}"),
        ("Mean PPL(base)", f"{perplexity_full:.6f}"),
        ("Cor(ln(PPL(Q)), ln(PPL(base)))", "undefined" if figures.correlation is None else f"{figures.correlation:.2%}"),
        ("Mean ln(PPL(Q)/PPL(base))", str(figures.log_ratio)),
        ("Mean PPL(Q)/PPL(base)", str(figures.ratio)),
        ("Mean KLD", str(figures.kl)),
        *((f"{name} KLD", f"{value:.6f}") for name, value in figures.kl_percentiles.named()),
        ("Mean Δp", figures.probability_change.percent()),
        *((f"{name} Δp", f"{value:.3%}") for name, value in figures.probability_change_percentiles.named()),
        ("RMS Δp", figures.probability_change_rms.percent()),
        ("Same top p", f"{1 - flip_rate:.3%}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}: {value}\n" for name, value in rows)


def _mean(values: Floats) -> Estimate:
    return Estimate(value=float(values.mean()), error=float(values.std(ddof=1) / np.sqrt(values.size)))


def _percentiles(values: Floats) -> Percentiles:
    found = np.percentile(values, PERCENTS)
    return Percentiles(
        minimum=float(values.min()),
        maximum=float(values.max()),
        by_percent={f"{percent:g}": float(value) for percent, value in zip(PERCENTS, found, strict=True)},
    )
