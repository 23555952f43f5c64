"""llama-perplexity's statistics: each against its formula, written out position by position."""

from __future__ import annotations

import math
import statistics as plain

import numpy as np
import pytest

from kivi.measure import perplexity

FULL = [0.1, 2.0, 0.7, 3.5, 1.2]
CACHED = [0.2, 1.9, 0.7, 4.1, 1.0]
KL = [0.01, 0.0, 0.002, 0.3, 0.04]


def figures() -> perplexity.PerplexityStatistics:
    found = perplexity.statistics(np.array(KL), np.array(CACHED), np.array(FULL))
    assert found is not None
    return found


def error_of(values: list[float]) -> float:
    return plain.stdev(values) / math.sqrt(len(values))


def test_each_figure_is_its_formula() -> None:
    found = figures()
    differences = [one - base for one, base in zip(CACHED, FULL, strict=True)]
    assert (found.log_ratio.value, found.log_ratio.error) == pytest.approx((plain.fmean(differences), error_of(differences)))
    ratio = math.exp(plain.fmean(CACHED)) / math.exp(plain.fmean(FULL))
    assert (found.ratio.value, found.ratio.error) == pytest.approx((ratio, ratio * error_of(differences)))
    assert found.correlation == pytest.approx(plain.correlation(CACHED, FULL))
    changes = [math.exp(-one) - math.exp(-base) for one, base in zip(CACHED, FULL, strict=True)]
    assert (found.probability_change.value, found.probability_change.error) == pytest.approx(
        (plain.fmean(changes), error_of(changes))
    )
    assert found.probability_change_rms.value == pytest.approx(math.sqrt(plain.fmean(change**2 for change in changes)))
    assert (found.kl.value, found.kl.error) == pytest.approx((plain.fmean(KL), error_of(KL)))
    assert (found.kl_percentiles.minimum, found.kl_percentiles.maximum) == (0.0, 0.3)
    assert found.kl_percentiles.by_percent["50"] == 0.01


def test_the_full_cache_against_itself_changes_nothing() -> None:
    found = perplexity.statistics(np.zeros(5), np.array(FULL), np.array(FULL))
    assert found is not None
    assert (found.ratio.value, found.ratio.error) == (1, 0)
    assert found.correlation == pytest.approx(1)
    assert (found.probability_change_rms.value, found.probability_change_rms.error) == (0, 0)


@pytest.mark.parametrize(("positions", "there"), [(1, False), (2, True)])
def test_few_or_equal_positions_are_no_error(positions: int, there: bool) -> None:
    found = perplexity.statistics(np.zeros(positions), np.ones(positions), np.ones(positions))
    assert (found is not None) is there
    assert found is None or found.correlation is None


def test_the_text_has_the_names_of_llama_perplexity() -> None:
    text = perplexity.show(figures(), perplexity=4.8, perplexity_full=4.5, flip_rate=0.25)
    lines = dict(line.split(": ", 1) for line in text.replace(" :", ":").splitlines() if ": " in line)
    names = {name.strip() for name in lines}
    assert {"Mean PPL(Q)", "Mean KLD", "Maximum KLD", "99.9% KLD", "Median KLD", "Minimum Δp", "RMS Δp", "Same top p"} <= names
    assert text.splitlines()[-1].endswith(": 75.000%")
    assert "Mean Δp" in text and "±" in text
