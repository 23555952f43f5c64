"""The allocation is the best of all, which tiny cases let one count."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.tune.allocation import Option, allocate

OPTIONS = st.builds(
    Option,
    bits=st.sampled_from((2, 3, 4, 8)),
    rotated=st.booleans(),
    size=st.integers(1, 40),
    error=st.floats(1e-9, 1e-2) | st.just(0.0),
)
SLOTS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(slots=SLOTS, share=st.floats(0, 1))
def test_no_other_choice_within_the_budget_has_less_error(slots: list[list[Option]], share: float) -> None:
    fewest, most = (sum(pick(option.size for option in slot) for slot in slots) for pick in (min, max))
    budget = fewest + share * (most - fewest)
    chosen = allocate(slots, budget)
    assert all(option in slot for option, slot in zip(chosen, slots, strict=True))
    assert sum(option.size for option in chosen) <= budget + 1e-6
    every = itertools.product(*slots)
    best = min(sum(o.error for o in one) for one in every if sum(o.size for o in one) <= budget + 1e-9)
    assert sum(option.error for option in chosen) == pytest.approx(best, rel=1e-6, abs=1e-15)


def test_layers_that_matter_get_the_bits() -> None:
    def slot(sensitivity: float) -> list[Option]:
        return [Option(bits, False, bits, sensitivity / 4**bits) for bits in (2, 3, 4, 8)]

    assert [option.bits for option in allocate([slot(1e-6), slot(1.0), slot(1e-3)], 9)] == [2, 4, 3]


def test_a_budget_below_the_smallest_options_is_refused() -> None:
    with pytest.raises(ValueError, match="budget=5: the smallest options take 7"):
        allocate([[Option(2, False, 3, 0.1)], [Option(2, False, 4, 0.1)]], 5)
