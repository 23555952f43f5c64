"""A cache that is broken on purpose, in four ways: which check of the audit and which measurement sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kivi.cache.single import KIVICache
from kivi.cache.storage import CodeStore
from kivi.codec import Packed
from kivi.measure.answers.questions import Question, measure_answers
from kivi.measure.audit import AuditSettings, audit_spec
from kivi.measure.monitor import Monitor
from kivi.measure.quality import score, summarise
from kivi.measure.reference import ReferenceStore
from kivi.measure.sequences import TokenStream
from kivi.measure.settings import AnswerSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

SPEC = CacheSpec.parse("kivi:bits=8,residual=32,backend=mlx")
TEXT = "Some text that goes on for long. " * 5
QUESTIONS = [Question(f"{TEXT}{number} is what? It is {number}", str(number)) for number in range(4)]


def drop_a_group(patch: pytest.MonkeyPatch) -> None:
    """The first group's keys come back as zeros."""
    append = CodeStore.append

    def dropping(self: CodeStore, keys: Packed, values: Packed) -> None:
        first = self.count == 0
        append(self, keys._replace(scale=0 * keys.scale, zero=0 * keys.zero) if first else keys, values)

    patch.setattr(CodeStore, "append", dropping)


def move_the_frontier(patch: pytest.MonkeyPatch) -> None:
    """Groups leave the window one token early."""
    right = CacheSpec.quantized_tokens
    patch.setattr(CacheSpec, "quantized_tokens", lambda self, tokens: right(self, tokens + 1))
    made = KIVICache.__init__

    def early(self: KIVICache, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        self._longest_exact -= 1

    patch.setattr(KIVICache, "__init__", early)


def keep_a_stale_prefix(patch: pytest.MonkeyPatch) -> None:
    """A trim takes tokens off the count and keeps them."""

    def trim(self: KIVICache, n: int) -> int:
        self.offset -= n
        return n

    patch.setattr(KIVICache, "trim", trim)


def put_a_layer_into_one_bit(patch: pytest.MonkeyPatch) -> None:
    """The keys of layer 0 have two levels a channel."""
    quantise = KIVICache._quantize

    def coarse(self: KIVICache, keys: mx.array, values: mx.array, calls: int) -> Any:
        if self.layer == 0:
            middle = mx.mean(keys, axis=-2, keepdims=True)
            keys = mx.where(keys > middle, mx.max(keys, axis=-2, keepdims=True), mx.min(keys, axis=-2, keepdims=True))
        return quantise(self, keys, values, calls)

    patch.setattr(KIVICache, "_quantize", coarse)


def logprob_difference(model: LoadedModel, references: ReferenceStore) -> float:
    settings = AnswerSettings(scorer="planted_fact", questions=len(QUESTIONS), tokens=1)
    asked = measure_answers(model, QUESTIONS, SPEC, settings, references=references, monitor=Monitor(), seed=0)
    assert asked.logprob_difference is not None
    return abs(asked.logprob_difference)


def mean_kl(model: LoadedModel, references: ReferenceStore, texts: list[str]) -> float:
    sequences = TokenStream(model.tokenizer, texts).pack(1, 257)
    return summarise(score(model, sequences, SPEC, references=references, monitor=Monitor()), 0).kl_mean


@pytest.mark.parametrize(
    ("break_it", "checks", "moves_the_model"),
    [
        (drop_a_group, {"definition"}, True),
        (move_the_frontier, {"bytes"}, False),
        (keep_a_stale_prefix, {"trim", "prefix", "cancel"}, False),
        (put_a_layer_into_one_bit, set(), True),  # the audit feeds a cache by itself, which is no model's layer
    ],
)
def test_a_break_is_seen(
    break_it: Callable[[pytest.MonkeyPatch], None],
    checks: set[str],
    moves_the_model: bool,
    tiny: Callable[..., LoadedModel],
    references: ReferenceStore,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    honest = logprob_difference(model, references), mean_kl(model, references, texts)
    break_it(monkeypatch)
    broken = logprob_difference(model, references), mean_kl(model, references, texts)
    assert [after > 10 * before for before, after in zip(honest, broken, strict=True)] == [moves_the_model] * 2
    named = ["bytes", "definition", "trim", "prefix", "cancel"]
    report = audit_spec(SPEC, AuditSettings(decode_steps=40, history=256), names=named)
    assert checks <= {check for check, _ in report.findings("error")}
    assert bool(checks) is not report.passed
