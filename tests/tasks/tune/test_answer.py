"""The Pareto front, tiers at the ends of intervals, budgets, and what cannot be met."""

from __future__ import annotations

from typing import Any

import pytest
from made_candidates import candidate, quality

from tasks.tune.answer import TuneError, bytes_budget, choose, front, promised_tier, recommend
from tasks.tune.config import TuneConfig

GOOD, BETTER = candidate("kivi:bits=4", 400, 0.002, flips=0.005), candidate("kivi:bits=8", 800, 0.0001)
POOR, WASTE = candidate("kivi:bits=2", 200, 0.05, flips=0.02), candidate("kivi:bits=3", 500, 0.004)
MLX = candidate("mlx-quantized:bits=4", 600, 0.001, family="mlx-lm")
EVERY = [WASTE, BETTER, POOR, MLX, GOOD]


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    assert front(EVERY) == [POOR, GOOD, MLX, BETTER]


def test_a_tier_is_promised_only_where_the_upper_ends_of_the_intervals_have_it() -> None:
    assert promised_tier(quality(0.008)) == "good"
    assert promised_tier(quality(0.008, spread=0.5)) == "marginal"
    assert promised_tier(quality(0.001, flips=0.008)) == "marginal"


def test_without_a_budget_the_smallest_of_each_tier_is_chosen() -> None:
    assert choose(TuneConfig(), EVERY, 0) == {"good": GOOD, "marginal": POOR}
    assert choose(TuneConfig(), [BETTER], 0) == {"good": BETTER}


def test_a_budget_of_kl_takes_the_smallest_and_one_of_bytes_the_best() -> None:
    (one,) = choose(TuneConfig(kl=0.003), EVERY, 0).values()
    assert one == GOOD
    (one,) = choose(TuneConfig(bytes_per_token=700), EVERY, 0).values()
    assert one == MLX
    config = TuneConfig(memory="5MB", context=4096, batch=2)
    (one,) = choose(config, EVERY, 5_000_000 - 2 * 4096 * 450).values()
    assert one == GOOD


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kl": 1e-6}, r"kl=1e-06: no setting .* kivi:k8v8, has 0.0001 nats at 800 bytes a token"),
        ({"bytes_per_token": 100}, r"bytes_per_token=100: .* 1 × 4096 tokens, and the smallest setting takes 200"),
        ({"memory": "1MB"}, r"memory=1,000,000: the weights of 'embedded' alone take 1,000,000 bytes"),
    ],
)
def test_a_budget_that_nothing_meets_is_a_sentence_with_the_numbers(fields: dict[str, Any], sentence: str) -> None:
    config = TuneConfig(**fields)
    with pytest.raises(TuneError, match=sentence):
        choose(config, EVERY, 1_000_000)


def test_memory_is_what_the_weights_leave_by_token_and_sequence() -> None:
    assert bytes_budget(TuneConfig(memory="2GB", context=1000, batch=5), 1_000_000_000) == 200_000
    assert bytes_budget(TuneConfig(), 1) is None


def test_the_sentence_has_its_numbers_and_mlx_lms_nearest() -> None:
    sentence = recommend("good", GOOD, EVERY, 0.9).sentence
    numbers = ("400 bytes a token at 4,096", "0.5% flips", "0.90 times", "mlx-lm's smallest with no more KL takes 600")
    for part in ("good: kivi:k4v4", *numbers):
        assert part in sentence
    assert "mlx-lm" not in recommend("good", BETTER, EVERY, None).sentence
