from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.measure.answers.scorers import SCORERS, ScorerName


def score(name: ScorerName, answer: str, text: str) -> float:
    return SCORERS[name].score(answer, text)


def test_every_name_has_a_scorer() -> None:
    assert set(SCORERS) == set(get_args(ScorerName))


@pytest.mark.parametrize("name", SCORERS)
@given(answer=st.integers(0, 10**6).map(str), text=st.text(max_size=80))
def test_a_score_is_a_share_and_the_answer_itself_is_right(name: ScorerName, answer: str, text: str) -> None:
    assert 0 <= score(name, answer, text) <= 1
    assert score(name, answer, answer) == 1
    assert score(name, answer, "") == 0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *[("2069", 1), (" 2069.", 1), ("It is (2069)", 1), ("20691", 0), ("12069", 0), ("206 9", 0), ("x2069", 0), ("", 0)],
        *[("1,2069", 0), ("12.2069", 0), ("2069.5", 0), ("2069,1", 0), ("no, 2069", 1), ("2069, it is", 1)],
    ],
)
def test_a_planted_fact_is_found_whole(text: str, right: float) -> None:
    assert score("planted_fact", "2069", text) == right


def test_a_planted_fact_is_text_not_a_pattern_and_may_be_shouted() -> None:
    assert score("planted_fact", "a.c", "abc") == 0
    assert score("planted_fact", "Blue door", "the BLUE DOOR") == 1


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("... so 9 * 2 = 18\n#### 18", 1),
        ("#### 18\nThat is 9 twice.", 1),  # the mark counts, not the last number
        ("#### 18 eggs of 20", 1),
        ("The answer is $18.00.", 1),
        ("18", 1),
        ("#### 19", 0),
        ("#### -18", 0),
        ("18 or 19", 0),
        ("none", 0),
        ("#### none, though 18", 1),
        ("####", 0),
    ],
)
def test_an_exact_answer_is_the_number_at_the_end(text: str, right: float) -> None:
    assert score("exact_answer", "9 * 2 = 18\n#### 18", text) == right


def test_numbers_are_equal_not_their_digits() -> None:
    assert score("exact_answer", "#### 1,000", "#### 1000.0") == 1
    assert score("exact_answer", "#### 0.5", ".5") == 1
    assert score("exact_answer", "no number", "no number") == 0


def test_agreement_counts_words_and_signs_but_no_spaces() -> None:
    answer = "    return [x for x in xs]\n"
    assert score("text_agreement", answer, "return [ x for x in xs ]") == 1
    assert score("text_agreement", answer, "return [y for y in xs]") == pytest.approx(2 * 6 / 16)
    assert score("text_agreement", answer, "raise ValueError") == 0


def test_a_text_ends_where_the_next_thing_begins() -> None:
    assert SCORERS["planted_fact"].cut("\n 2069\nQuestion: 1") == "\n 2069"
    assert SCORERS["exact_answer"].cut("#### 18\n\nQuestion: how many\nQ: ?") == "#### 18\n"
    assert SCORERS["text_agreement"].cut("\n    return 1\n\ndef f(): pass\n# x") == "\n    return 1\n"
    assert SCORERS["text_agreement"].cut("return 1") == "return 1"
