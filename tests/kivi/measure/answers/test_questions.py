from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kivi.measure import MeasureError
from kivi.measure.__main__ import read_questions, read_texts
from kivi.measure.answers import questions as answers
from kivi.measure.answers.questions import Question, measure_answers, reply_greedily, tokenize
from kivi.measure.arms import FULL
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import Answers
from kivi.measure.sequences import encode
from kivi.measure.settings import AnswerSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

Tiny = Callable[..., LoadedModel]
Ask = Callable[..., Answers]
PACKED = CacheSpec.parse("kivi:bits=2,residual=0,backend=mlx")
SETTINGS = AnswerSettings(scorer="text_agreement", questions=4, tokens=6)
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)


def question(number: int, length: int = 60, depth: float | None = None) -> Question:
    body = f"Fact {number} is planted here, and {number * number} too. " * 9
    return Question(f"{body[:length]}\nAnswer: {number}", str(number), depth)


QUESTIONS = [question(2, 50, 0.0), question(3, 90, 0.0), question(4, 90, 1.0), question(5, 120, 1.0), question(6)]


@pytest.fixture
def ask(tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> Ask:
    """Ask the tiny llama: ``ask(spec, settings, questions)``."""

    def run(
        spec: CacheSpec = FULL, settings: AnswerSettings = SETTINGS, questions: Any = QUESTIONS, model: Any = None
    ) -> Answers:
        chosen = {"references": references, "monitor": monitor, "seed": 0}
        return measure_answers(model or tiny(), questions, spec, settings, **chosen)

    return run


def test_the_full_cache_says_what_the_full_cache_says(ask: Ask) -> None:
    asked = ask()
    assert asked.questions == len(asked.answers) == 4
    assert [one.text for one in asked.answers] == [one.text_full for one in asked.answers]
    assert asked.accuracy == asked.accuracy_full
    assert Answers.model_validate_json(asked.model_dump_json()) == asked


def test_what_a_cache_says_is_scored_beside_the_full_one(ask: Ask) -> None:
    prompts = [Question(f"{one.text} x", "x") for one in QUESTIONS]
    said = [one.text_full for one in ask(questions=prompts).answers]
    known = [Question(f"{one.text} {text}", text) for one, text in zip(QUESTIONS, said, strict=False)]
    asked = ask(PACKED, questions=known)
    assert asked.accuracy_full == 1
    assert asked.accuracy < 1  # 2 bits without a window: random weights do not survive that
    assert asked.difference_interval is not None and asked.difference_interval.high < 0
    assert [one.score == 1 for one in asked.answers] == [one.text == one.text_full for one in asked.answers]


def test_batches_hold_equal_lengths_and_change_no_answer(
    ask: Ask, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, monitor: Monitor
) -> None:
    seen: list[list[int]] = []

    def spy(model: Any, spec: Any, prompts: Any, *rest: Any) -> Any:
        seen.append([len(prompt) for prompt in prompts])
        return reply_greedily(model, spec, prompts, *rest)

    monkeypatch.setattr(answers, "reply_greedily", spy)
    together = ask()
    assert seen == [[58], [98, 98], [128]] * 2  # shortest first; this cache, then the full one
    for index, one in enumerate(QUESTIONS[:4]):
        alone = ReferenceStore(tmp_path / str(index), 10**9)
        settings = SETTINGS.model_copy(update={"questions": 1})
        single = measure_answers(tiny(), [one], FULL, settings, references=alone, monitor=monitor, seed=0)
        assert single.answers[0].text == together.answers[index].text


def test_the_full_caches_continuations_are_kept_for_the_next_cell(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(PACKED)
    kinds: list[str] = []

    def spy(model: Any, spec: CacheSpec, *rest: Any) -> Any:
        kinds.append(spec.kind)
        return reply_greedily(model, spec, *rest)

    monkeypatch.setattr(answers, "reply_greedily", spy)
    assert ask(PACKED) == first
    assert set(kinds) == {"kivi"}
    ask(PACKED, SETTINGS.model_copy(update={"tokens": 5}))
    assert set(kinds) == {"kivi", "full"}


def test_the_right_answers_log_probability_is_that_of_its_tokens_after_the_prompt(ask: Ask, tiny: Tiny) -> None:
    """Of questions in one batch whose answers differ in length; the model reads prompt and answer at once."""
    model = tiny()
    prompts = [
        Question(f"{one.text} and {answer}", f" and {answer}")
        for one, answer in zip(QUESTIONS[1:3], ("more", "x"), strict=True)
    ]
    asked = ask(PACKED, SETTINGS.model_copy(update={"questions": 2}), prompts)
    for one, answer in zip(prompts, asked.answers, strict=True):
        start, reply = tokenize(model, [], one, chat=False), encode(model.tokenizer, one.reply)
        logits = model.model(mx.array([start + reply]))[0, len(start) - 1 : -1].astype(mx.float32)
        log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        expected = sum(log_p[index, token].item() for index, token in enumerate(reply))
        assert answer.logprob_full == pytest.approx(expected, abs=1e-4)
        assert answer.logprob != pytest.approx(expected, abs=1e-4)  # 2 bits without a window
    changes = [one.logprob - one.logprob_full for one in asked.answers]
    assert asked.logprob_difference == pytest.approx(sum(changes) / 2)
    assert asked.logprob_worst == min(changes)
    assert asked.logprob_interval is not None


def test_the_full_cache_makes_no_answer_less_probable(ask: Ask) -> None:
    asked = ask()
    assert asked.logprob_difference == asked.logprob_worst == 0


def test_buckets_are_by_length_and_depth_and_hold_every_question_once(ask: Ask) -> None:
    asked = ask(PACKED)
    buckets = [(bucket.length, bucket.depth, bucket.questions) for bucket in asked.by_depth_and_length]
    assert buckets == [(64, 0.0, 1), (128, 0.0, 1), (128, 1.0, 2)]
    total = sum(bucket.questions * bucket.accuracy for bucket in asked.by_depth_and_length)
    assert total / asked.questions == pytest.approx(asked.accuracy)


def test_examples_come_before_each_question_are_not_asked_and_are_in_the_result(ask: Ask, tiny: Tiny) -> None:
    asked = ask(settings=SETTINGS.model_copy(update={"shots": 1, "questions": 3}))
    assert asked.examples == [QUESTIONS[0].text]
    assert [one.expected for one in asked.answers] == ["3", "4", "5"]
    model = tiny()
    tokens = tokenize(model, QUESTIONS[:1], QUESTIONS[1], chat=False)
    assert model.tokenizer.decode(tokens) == f"{QUESTIONS[0].text}\n\n{QUESTIONS[1].prompt}"
    assert not QUESTIONS[1].prompt.endswith((" ", "3"))
    assert asked.chat_template is None
    assert asked.prompts_sha256 != ask(settings=SETTINGS.model_copy(update={"questions": 3})).prompts_sha256


def test_a_chat_goes_through_the_template_which_is_in_the_result(ask: Ask, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    settings = SETTINGS.model_copy(update={"chat": True, "shots": 1})
    with pytest.raises(MeasureError, match="chat=true, but 'llama' has no chat template"):
        ask(settings=settings, model=model)
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATE)
    assert ask(settings=settings, model=model).chat_template == TEMPLATE
    text = model.tokenizer.decode(tokenize(model, QUESTIONS[:1], QUESTIONS[1], chat=True))
    assert text == f"<user>{QUESTIONS[0].prompt}<assistant>2<user>{QUESTIONS[1].prompt}<go>"


def test_an_answer_ends_at_an_end_token_or_a_stop(ask: Ask, tiny: Tiny) -> None:
    model = tiny()
    prompts = [tokenize(model, [], QUESTIONS[0], chat=False)]
    known = [model.tokenizer.encode("2")]
    free = reply_greedily(model, FULL, prompts, known, 6, lambda _: False, lambda: None)[0].tokens
    assert len(free) == 6
    (cut,) = reply_greedily(model, FULL, prompts, known, 6, lambda row: len(row) == 3, lambda: None)
    assert cut.tokens == free[:3]
    ending = replace(model, tokenizer=TokenizerWrapper(model.tokenizer, eos_token_ids=[free[2]]))
    asked = ask(model=ending, questions=QUESTIONS[:1], settings=SETTINGS.model_copy(update={"questions": 1}))
    assert asked.answers[0].text == model.tokenizer.decode(free[: free.index(free[2])])


def test_too_few_questions_and_too_long_ones_are_refused(ask: Ask, tiny: Tiny) -> None:
    with pytest.raises(MeasureError, match="4 questions and 2 examples need 6 rows with an answer, there are 5"):
        ask(settings=SETTINGS.model_copy(update={"shots": 2}))
    model = tiny()
    model.config["max_position_embeddings"] = 130
    with pytest.raises(MeasureError, match=r"a question takes 134 tokens with its answer, and 'llama' was made for 130"):
        ask(model=model)


@pytest.mark.parametrize(("text", "answer"), [("a b", "c"), ("a b", ""), ("a  ", " "), ("b", "b"), (" b", "b")])
def test_a_text_must_end_with_its_answer(text: str, answer: str) -> None:
    with pytest.raises(MeasureError, match="is not the end of its text"):
        Question(text, answer)


def test_nan_stops_the_questions(ask: Ask, tiny: Tiny) -> None:
    model = tiny()
    model.model.model.norm.weight = mx.full((64,), float("nan"))
    with pytest.raises(MeasureError, match="NaN or infinity in the logits of decode step 0"):
        ask(model=model)


def test_the_deadline_stops_the_questions(tiny: Tiny, references: ReferenceStore) -> None:
    with pytest.raises(DeadlineError, match="answers of full: stopped at 0 of 4"):
        measure_answers(tiny(), QUESTIONS, FULL, SETTINGS, references=references, monitor=Monitor(deadline_s=0.0), seed=0)


def test_questions_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"text": "1 + 1 is 2", "answer": "2"}\n{"text": "Blue. Which? Blue", "answer": "Blue", "depth": 0.5}\n')
    assert read_questions(path) == [Question("1 + 1 is 2", "2"), Question("Blue. Which? Blue", "Blue", 0.5)]
    path.write_text('{"text": "1 + 1 is 2"}\n')
    with pytest.raises(MeasureError, match="line 1: expected a JSON object with text and answer"):
        read_questions(path)


def test_only_a_newline_ends_a_json_line(tmp_path: Path) -> None:
    """JSON may hold U+2028, U+2029 and U+0085 as they are, which end lines in Unicode."""
    path, text = tmp_path / "own.jsonl", "one\u2028two\u2029three\x85four"
    row = json.dumps({"text": text, "answer": "four"}, ensure_ascii=False)
    path.write_text(f"{row}\n{row}\n", encoding="utf-8")
    assert read_texts(path) == [text, text]
    assert read_questions(path) == [Question(text, "four")] * 2
    path.write_text("", encoding="utf-8")
    assert read_texts(path) == []
