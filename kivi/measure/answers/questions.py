"""Questions with right answers: each prompt is continued greedily, with the spec's cache and with the full one, and scored.

Each cache is also asked how probable the right answer is, fed token by token after the prompt: that sees damage long before a
greedy answer changes, and in models that answer nothing right.

Few-shot examples are the first questions of the set, with their answers; they are not asked. Only prompts of equal length are
batched, so that no padding is in any cache. The full cache's continuations are kept from cell to cell.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np

from kivi.measure import MeasureError
from kivi.measure.answers.scorers import SCORERS, Scorer
from kivi.measure.arms import FULL, Arm, batch
from kivi.measure.generation import TAIL, require_finite
from kivi.measure.intervals import bootstrap_interval
from kivi.measure.monitor import Monitor
from kivi.measure.quality import log_softmax
from kivi.measure.reference import ReferenceStore, Reply
from kivi.measure.results import Answer, AnswerBucket, Answers
from kivi.measure.sequences import SEPARATOR, encode, encode_begun
from kivi.measure.settings import AnswerSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

BATCH = 8  # prompts of equal length that are continued at once


@dataclass(frozen=True)
class Question:
    """A text that ends with the right answer; ``depth`` says where in it a fact stands, as a share, if one does.

    Raises:
        MeasureError: there is no answer, nothing before it, or the text does not end with it.
    """

    text: str
    answer: str
    depth: float | None = None

    def __post_init__(self) -> None:
        if not self.answer.strip() or not self.text.endswith(self.answer) or not self.prompt:
            raise MeasureError(
                f"the answer {self.answer!r:.60} is not the end of its text, which ends with {self.text[-60:]!r}"
            )

    @property
    def prompt(self) -> str:
        """The text before the answer, without spaces at its end: a token often begins with a space."""
        return self.text.removesuffix(self.answer).rstrip(" ")

    @property
    def reply(self) -> str:
        """What follows the prompt: the answer, with the spaces before it."""
        return self.text[len(self.prompt) :]


@dataclass(frozen=True)
class _Asked:
    question: Question
    tokens: list[int]
    answer: list[int]


def measure_answers(
    model: LoadedModel,
    questions: Sequence[Question],
    spec: CacheSpec,
    settings: AnswerSettings,
    *,
    references: ReferenceStore,
    monitor: Monitor,
    seed: int,
) -> Answers:
    """Ask the questions of both caches and score what they say.

    Args:
        model: The model.
        questions: The examples first, then those that are asked.
        spec: The cache.
        settings: The scorer, and how many questions are asked and how.
        references: Where the full cache's continuations are kept.
        monitor: Progress and deadline.
        seed: Of the resampling.

    Raises:
        MeasureError: there are too few questions, one is too long for the model, or logits are not finite.
    """
    needed = settings.shots + settings.questions
    if len(questions) < needed:
        raise MeasureError(
            f"{settings.questions} questions and {settings.shots} examples need {needed} rows with an answer, "
            f"there are {len(questions)}: ask fewer"
        )
    examples, chosen = questions[: settings.shots], questions[settings.shots : needed]
    asked = [_ask(model, examples, question, chat=settings.chat) for question in chosen]
    _require_context(model, asked, settings)
    given = _reply_all(model, spec, asked, settings, None, monitor)
    given_full = _reply_all(model, FULL, asked, settings, references, monitor)
    scorer = SCORERS[settings.scorer]
    answers = [_score(model, *one, scorer) for one in zip(asked, given, given_full, strict=True)]
    changes = [logprob - logprob_full for (_, logprob), (_, logprob_full) in zip(given, given_full, strict=True)]
    return Answers(
        accuracy=fmean(one.score for one in answers),
        accuracy_full=fmean(one.score_full for one in answers),
        questions=len(answers),
        difference_interval=bootstrap_interval([one.score - one.score_full for one in answers], "questions", seed),
        logprob_difference=fmean(changes),
        logprob_worst=min(changes),
        logprob_interval=bootstrap_interval(changes, "questions", seed),
        scorer=settings.scorer,
        tokens=settings.tokens,
        examples=[example.text for example in examples],
        chat_template=str(model.tokenizer.chat_template) if settings.chat else None,
        prompts_sha256=hashlib.sha256(json.dumps([one.tokens for one in asked]).encode()).hexdigest(),
        by_depth_and_length=_buckets(answers, changes),
        answers=answers,
    )


def tokenize(model: LoadedModel, examples: Sequence[Question], question: Question, *, chat: bool) -> list[int]:
    """Return the tokens of a prompt: examples and question as one text, or as the turns of a chat.

    Raises:
        MeasureError: a chat is asked for, and the model has no chat template.
    """
    tokenizer = model.tokenizer
    if not chat:
        text = SEPARATOR.join([*(example.text for example in examples), question.prompt])
        return encode_begun(tokenizer, text)
    if getattr(tokenizer, "chat_template", None) is None:
        raise MeasureError(f"chat=true, but {model.name!r} has no chat template")
    messages = []
    for example in examples:
        messages.append({"role": "user", "content": example.prompt})
        messages.append({"role": "assistant", "content": example.answer})
    messages.append({"role": "user", "content": question.prompt})
    return encode(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def reply_greedily(
    model: LoadedModel,
    spec: CacheSpec,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    steps: int,
    ended: Callable[[list[int]], bool],
    step: Callable[[], None],
) -> list[Reply]:
    """Return the greedy continuation of each of some prompts, up to where it ended, and its answer's log-probability.

    Args:
        model: The model.
        spec: The cache.
        prompts: Prompts of equal length.
        answers: The right answer of each.
        steps: Most tokens of a continuation.
        ended: Whether a continuation is over.
        step: Called before each step; it may raise.

    Raises:
        MeasureError: logits are not finite.
        NonFiniteError: a cache holds NaN or infinity.
    """
    arm = Arm(model, spec)
    logits = arm.prefill(batch(prompts))
    logprobs = _answer_logprobs(arm, logits, answers, step)
    rows: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(rows)))
    for index in range(steps):
        step()
        require_finite(logits, arm, index)
        tokens = np.array(mx.argmax(logits, axis=-1), dtype=np.int64)
        for row in going:
            rows[row].append(int(tokens[row]))
        going = {row for row in going if not ended(rows[row])}
        if not going or index + 1 == steps:
            break
        logits = arm.decode(mx.array(tokens)[:, None])  # rows that have ended are fed on and not looked at
    arm.check_finite()
    return [Reply(*one) for one in zip(rows, logprobs, strict=True)]


def _answer_logprobs(arm: Arm, logits: mx.array, answers: Sequence[Sequence[int]], step: Callable[[], None]) -> list[float]:
    """Return the log-probability of each answer after the prompts that ``arm`` holds, in nats; the arm stays as it is."""
    caches = copy.deepcopy(arm.caches)
    logprobs = np.zeros(len(answers), np.float32)
    for index in range(max(map(len, answers))):
        step()
        if index:  # answers that have ended are fed on and not looked at
            logits = arm.decode(mx.array([[answer[min(index, len(answer)) - 1]] for answer in answers]), caches)
        require_finite(logits, arm, index)
        log_p = log_softmax(logits)
        for row, answer in enumerate(answers):
            if index < len(answer):
                logprobs[row] += log_p[row, answer[index]].item()
    return [float(logprob) for logprob in logprobs]


def _ask(model: LoadedModel, examples: Sequence[Question], question: Question, *, chat: bool) -> _Asked:
    reply = question.answer if chat else question.reply
    return _Asked(question, tokenize(model, examples, question, chat=chat), encode(model.tokenizer, reply))


def _reply_all(
    model: LoadedModel,
    spec: CacheSpec,
    asked: Sequence[_Asked],
    settings: AnswerSettings,
    references: ReferenceStore | None,
    monitor: Monitor,
) -> list[tuple[str, float]]:
    """Return the text that follows each prompt and its answer's log-probability; ``references`` are asked first."""
    scorer, ends = SCORERS[settings.scorer], _end_tokens(model.tokenizer)

    def text_of(tokens: list[int]) -> str:
        return str(model.tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens))

    def ended(tokens: list[int]) -> bool:
        text = text_of(tokens)
        return tokens[-1] in ends or scorer.cut(text) != text

    given: dict[int, tuple[str, float]] = {}
    for members in _batches(asked):
        prompts, answers = [asked[index].tokens for index in members], [asked[index].answer for index in members]
        step = partial(monitor.step, f"answers of {spec.kind}", len(given), len(asked))
        proceed = partial(reply_greedily, model, spec, prompts, answers, settings.tokens, ended, step)
        rules = [settings.tokens, *scorer.stops, answers]
        for index, reply in zip(
            members, references.replies(model, prompts, rules, proceed) if references else proceed(), strict=True
        ):
            given[index] = scorer.cut(text_of(reply.tokens)), reply.logprob
    return [given[index] for index in range(len(asked))]


def _batches(asked: Sequence[_Asked]) -> Iterator[list[int]]:
    """Yield the places of prompts of equal length, at most ``BATCH`` at once, short ones first."""
    order = sorted(range(len(asked)), key=lambda index: len(asked[index].tokens))
    for _, group in itertools.groupby(order, key=lambda index: len(asked[index].tokens)):
        same = list(group)
        yield from (same[start : start + BATCH] for start in range(0, len(same), BATCH))


def _score(model: LoadedModel, one: _Asked, given: tuple[str, float], given_full: tuple[str, float], scorer: Scorer) -> Answer:
    expected, (text, logprob), (text_full, logprob_full) = one.question.answer, given, given_full
    return Answer(
        prompt_tail=model.tokenizer.decode(one.tokens[-TAIL:]),
        expected=expected,
        text=text,
        text_full=text_full,
        score=scorer.score(expected, text),
        score_full=scorer.score(expected, text_full),
        logprob=logprob,
        logprob_full=logprob_full,
        tokens=len(one.tokens),
        depth=one.question.depth,
    )


def _buckets(answers: Sequence[Answer], changes: Sequence[float]) -> list[AnswerBucket]:
    """Return the answers by the next power of two of their prompt's tokens, and by depth."""
    buckets: dict[tuple[int, float | None], list[tuple[Answer, float]]] = {}
    for answer, change in zip(answers, changes, strict=True):
        buckets.setdefault((1 << (answer.tokens - 1).bit_length(), answer.depth), []).append((answer, change))
    return [
        AnswerBucket(
            length=length,
            depth=depth,
            questions=len(members),
            accuracy=fmean(one.score for one, _ in members),
            accuracy_full=fmean(one.score_full for one, _ in members),
            logprob_difference=fmean(change for _, change in members),
        )
        for (length, depth), members in sorted(buckets.items(), key=lambda item: (item[0][0], item[0][1] or 0.0))
    ]


def _end_tokens(tokenizer: Any) -> set[int]:
    """Return the tokens that end a text: mlx-lm's tokenizers know a set of them, plain ones of transformers one or none."""
    found = getattr(tokenizer, "eos_token_ids", None)
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)


def _require_context(model: LoadedModel, asked: Sequence[_Asked], settings: AnswerSettings) -> None:
    limit = model.text_config.get("max_position_embeddings")
    longest = max(len(one.tokens) for one in asked) + settings.tokens
    if limit is not None and longest > limit:
        raise MeasureError(
            f"a question takes {longest} tokens with its answer, and {model.name!r} was made for {limit}: "
            "give shorter texts or fewer examples"
        )
