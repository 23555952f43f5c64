"""Generation: what a cache's error does step by step, teacher-forced and free-running.

All prompts are one batch of equal lengths, so that ordinary caches serve and the weights are read once a step. The full
cache decodes greedily first; end-of-text tokens are tokens like others, every continuation has all its steps.

- Teacher-forced: the cache is fed the full cache's tokens, one a call. Its logits differ by the cache's error alone.
- Free-running: it is fed its own. Once a token differs, the texts are different texts, and cosine or agreement say
  nothing more of the cache: they are reported as trajectory.

Both are the same run until some row's token differs; only from there on are they two.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kivi.measure import MeasureError
from kivi.measure.arms import Arm, all_finite, batch
from kivi.measure.memory import peak_of
from kivi.measure.monitor import Monitor
from kivi.measure.quality import divergence
from kivi.measure.reference import ReferenceStore, Trajectory
from kivi.measure.results import Continuation, Generation
from kivi.models import LoadedModel

TAIL = 48  # tokens of a prompt that are shown
NGRAM = 4
PEAK_STEPS = 2  # decode steps whose peak is taken, after the last one, with one copy of the caches alive


@dataclass
class Decoded:
    """What one arm did: tokens ``[B, steps]``, and per step the mean over rows of cosine and KL."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    cosine: list[float] = field(default_factory=list)
    cosine_free: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    peak_prefill: int = 0
    peak_decode: int = 0
    fed: int = 0  # tokens a row that the caches hold in the end


def reference_trajectory(
    model: LoadedModel, prompts: Sequence[Sequence[int]], steps: int, *, references: ReferenceStore, monitor: Monitor
) -> Trajectory:
    """Return the full cache's greedy continuations, decoded now or found."""
    return references.trajectory(model, prompts, steps, lambda done: monitor.step("reference", done, steps))


def decode(arm: Arm, prompts: Sequence[Sequence[int]], reference: Trajectory, monitor: Monitor) -> Decoded:
    """Prefill ``prompts`` and decode as many steps as ``reference`` has, free-running and on its tokens.

    Afterwards the arm's caches hold the prompts and the free-running tokens but the last, and ``PEAK_STEPS`` more.

    Raises:
        MeasureError: logits are not finite.
    """
    steps = reference.tokens.shape[1]
    logits: list[mx.array] = []
    peak_prefill = peak_of(lambda: logits.append(arm.prefill(batch(prompts))))
    free = forced = logits.pop()
    on_reference = arm.caches  # the caches that are fed the reference's tokens: the same ones until a token differs
    tokens: list[np.ndarray[Any, Any]] = []
    result = Decoded(tokens=np.empty((0, 0), np.int64), peak_prefill=peak_prefill)
    for step in range(steps):
        monitor.step("generate", step, steps)
        expected = mx.array(reference.logits[step])
        require_finite(free, arm, step)
        result.cosine.append(_cosine(expected, forced))
        result.cosine_free.append(_cosine(expected, free))
        result.kl.append(float(mx.mean(divergence(expected, forced))))
        tokens.append(np.array(mx.argmax(free, axis=-1), dtype=np.int64))
        if step + 1 == steps:
            break
        given = reference.tokens[:, step]
        if on_reference is arm.caches and not np.array_equal(tokens[-1], given):
            on_reference = copy.deepcopy(arm.caches)
        if on_reference is arm.caches:
            free = forced = arm.decode(mx.array(given)[:, None])
        else:
            free = arm.decode(mx.array(tokens[-1])[:, None])
            forced = arm.decode(mx.array(given)[:, None], on_reference)
    result.tokens = np.stack(tokens, axis=1)
    del on_reference, forced
    result.peak_decode = peak_of(lambda: _decode_more(arm, free))
    result.fed = len(prompts[0]) + steps - 1 + PEAK_STEPS
    return result


def summarise(model: LoadedModel, prompts: Sequence[Sequence[int]], reference: Trajectory, decoded: Decoded) -> Generation:
    """Return the typed figures, with prompts and texts decoded."""
    same = decoded.tokens == reference.tokens
    continuations = [
        Continuation(
            prompt_tail=model.tokenizer.decode(list(prompt[-TAIL:])),
            reference=model.tokenizer.decode(expected.tolist()),
            text=model.tokenizer.decode(observed.tolist()),
            agreement=float(row.mean()),
            first_divergence=None if row.all() else int(np.argmin(row)),
        )
        for prompt, expected, observed, row in zip(prompts, reference.tokens, decoded.tokens, same, strict=True)
    ]
    steps = same.shape[1]
    return Generation(
        token_agreement=float(same.mean()),
        first_divergence=float(np.mean([steps if row.all() else np.argmin(row) for row in same])),
        repetition_rate=repetition_rate(decoded.tokens),
        steps=steps,
        context=len(prompts[0]),
        logit_cosine=decoded.cosine,
        logit_cosine_free=decoded.cosine_free,
        step_kl=decoded.kl,
        continuations=continuations,
    )


def repetition_rate(tokens: np.ndarray[Any, Any]) -> float:
    """Return the share of 4-grams that occurred earlier in the same continuation, over all rows of ``[B, steps]``."""
    repeated = total = 0
    for row in tokens.tolist():
        grams = [tuple(row[start : start + NGRAM]) for start in range(len(row) - NGRAM + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def require_finite(logits: mx.array, arm: Arm, step: int) -> None:
    """Raise when ``logits`` hold NaN or infinity.

    Raises:
        MeasureError: they do; it names the cache and the decode step.
    """
    if not all_finite([logits]):
        raise MeasureError(
            f"{arm.spec.slug}: NaN or infinity in the logits of decode step {step}; look at the model's weights and dtype"
        )


def _decode_more(arm: Arm, logits: mx.array) -> None:
    for _ in range(PEAK_STEPS):
        logits = arm.decode(mx.argmax(logits, axis=-1)[:, None])


def _cosine(expected: mx.array, observed: mx.array) -> float:
    """Return the cosine of logits ``[B, vocabulary]``, the mean over rows."""
    observed = observed.astype(mx.float32)
    product = mx.sum(expected * observed, axis=-1)
    return float(mx.mean(product / (mx.linalg.norm(expected, axis=-1) * mx.linalg.norm(observed, axis=-1))))
