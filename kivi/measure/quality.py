"""Quality: how far a cache's logits are from the full cache's, teacher-forced on the same tokens.

At each position ``p`` the model has read tokens 0 to ``p``; the logits there, with the full cache and with the spec's, give

- ``KL(full || spec) = sum_v P(v) (log P(v) - log Q(v))`` over the whole vocabulary, in nats (:func:`divergence`);
- a flip, where the two most probable tokens differ;
- the loss ``-log Q(next token)``, whose mean's exponential is the perplexity.

Figures are over the positions whose query sees at least one quantised key (:mod:`kivi.measure.schedule`): positions before
that are exact and would only dilute. Where they are less than half, nothing was tested, and that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kivi.measure import MeasureError
from kivi.measure.arms import Arm
from kivi.measure.intervals import Floats, bootstrap_interval, samples
from kivi.measure.monitor import Monitor
from kivi.measure.perplexity import statistics
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import DepthBucket, Quality, StepCheck
from kivi.measure.schedule import first_visible, scoring_blocks
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

LEAST_COVERAGE = 0.5
FIRST_BUCKET = 128  # positions; each bucket of depth ends at twice the one before

# Logits are compared on a stream of their own while the model reads on: on a CPU that is a thread, and it takes a third of the
# time that reading takes.
COMPARING = mx.new_thread_local_stream(mx.default_device())


@dataclass
class Scores:
    """Every scored position of every sequence, ``[sequences, length]``; ``first`` is the first that sees a quantised key."""

    first: int
    kl: Floats
    flips: Floats
    loss: Floats
    loss_full: Floats
    control_kl: Floats | None = None
    control_flips: Floats | None = None
    kernel_kl: Floats | None = None


def score(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    spec: CacheSpec,
    *,
    references: ReferenceStore,
    monitor: Monitor,
    kernels: bool = True,
) -> Scores:
    """Score sequences of ``length + 1`` tokens at their first ``length`` positions.

    For a spec with packed layers there is a third arm, the control: the same codes, dequantised and attended by standard
    attention. Control against full is the quantiser's error, packed against control the kernels'. Without ``kernels`` the
    control alone is scored, in place of the packed layers: the quantiser's error in a fraction of the time on a CPU.

    Raises:
        MeasureError: no layer is quantised, the sequences are too short for the spec, or logits are not finite; it names the
            position.
    """
    length = len(sequences[0]) - 1
    layers = Arm(model, spec).layers
    if spec.kind != "full" and not layers:
        raise MeasureError(f"{spec.slug}: nothing would be tested: every layer keeps full precision; measure `full` instead")
    first = first_visible(layers)
    _require_coverage(first, length, spec)
    rows = [
        _score_sequence(model, tokens, spec, references, monitor, done, kernels) for done, tokens in _counted(sequences, length)
    ]
    columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return Scores(first=first, **columns)


def check_steps(
    model: LoadedModel,
    tokens: Sequence[int],
    spec: CacheSpec,
    scores: Scores,
    steps: int,
    *,
    references: ReferenceStore,
    monitor: Monitor,
) -> StepCheck:
    """Score the first ``steps`` positions of the first sequence that see a quantised key again, one token a call.

    It shows that scoring in chunks is decoding: the two differ by float noise.
    """
    stop = min(scores.first + steps, scores.kl.shape[1])
    arm, reference = Arm(model, spec), _Reader(references.logits(model, tokens[:-1]))
    if scores.first:
        reference.take(scores.first)
        arm.score(tokens, scores.first)
    stepped = []
    for position in range(scores.first, stop):
        monitor.step("score by step", position - scores.first, stop - scores.first)
        observed = arm.feed(tokens, [(position, position + 1)])
        stepped.append(float(divergence(reference.take(1), observed)[0]))
    chunked = scores.kl[0, scores.first : stop]
    return StepCheck(
        positions=len(stepped),
        kl_mean_steps=float(np.mean(stepped)),
        kl_mean_chunks=float(np.mean(chunked)),
        largest_difference=float(np.max(np.abs(np.asarray(stepped) - chunked))),
    )


def summarise(scores: Scores, seed: int, step_check: StepCheck | None = None) -> Quality:
    """Return the figures over the positions that see a quantised key."""
    seen = slice(scores.first, None)
    kl, flips = scores.kl[:, seen], scores.flips[:, seen]
    kl_samples, over = samples(list(kl))
    flip_samples, _ = samples(list(flips))
    return Quality(
        kl_mean=float(kl.mean()),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.percentile(kl, 99)),
        kl_max=float(kl.max()),
        flip_rate=float(flips.mean()),
        perplexity=float(np.exp(scores.loss[:, seen].mean(dtype=np.float64))),
        perplexity_full=float(np.exp(scores.loss_full[:, seen].mean(dtype=np.float64))),
        coverage=kl.shape[1] / scores.kl.shape[1],
        positions=kl.size,
        sequences=kl.shape[0],
        kl_interval=bootstrap_interval(kl_samples, over, seed),
        flip_interval=bootstrap_interval(flip_samples, over, seed),
        by_depth=list(_buckets(scores)),
        sequence_kl=kl_samples,
        sequence_flips=flip_samples,
        step_check=step_check,
        statistics=statistics(kl, scores.loss[:, seen], scores.loss_full[:, seen]),
        control_kl_mean=None if scores.control_kl is None else float(scores.control_kl[:, seen].mean()),
        control_flip_rate=None if scores.control_flips is None else float(scores.control_flips[:, seen].mean()),
        kernel_kl_mean=None if scores.kernel_kl is None else float(scores.kernel_kl[:, seen].mean()),
    )


def divergence(reference: mx.array, logits: mx.array) -> mx.array:
    """Return KL(reference || logits) in nats over the last axis, from float32 log-softmax.

    With ``d = log P - log Q`` the sum is over ``P (d + exp(-d) - 1)``. The added terms sum to ``sum Q - sum P = 0``, and make
    each term positive: the rounding of log-softmax, 1e-6 and of either sign in the plain sum, then counts by its square.
    """
    return _divergence(log_softmax(reference), log_softmax(logits))


def _divergence(expected: mx.array, observed: mx.array) -> mx.array:
    distance = expected - observed
    return mx.sum(mx.exp(expected) * (distance + mx.expm1(-distance)), axis=-1)


def log_softmax(logits: mx.array) -> mx.array:
    """Return log-probabilities in float32; the maximum is taken out first, which keeps what is left small and exact."""
    shifted = logits.astype(mx.float32)
    shifted = shifted - mx.max(shifted, axis=-1, keepdims=True)
    return shifted - mx.logsumexp(shifted, axis=-1, keepdims=True)


def _counted(sequences: Sequence[Sequence[int]], length: int) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """Yield how many positions are done, and will be in all, with each sequence."""
    for index, tokens in enumerate(sequences):
        yield (index * length, len(sequences) * length), tokens


def _score_sequence(
    model: LoadedModel,
    tokens: Sequence[int],
    spec: CacheSpec,
    references: ReferenceStore,
    monitor: Monitor,
    progress: tuple[int, int],
    kernels: bool,
) -> dict[str, Floats]:
    read, following = tokens[:-1], mx.array(list(tokens[1:]))
    arm = Arm(model, spec, control=not kernels)
    control = Arm(model, spec, control=True) if kernels and any(layer.kind == "kivi" for layer in arm.layers) else None
    reference = _Reader(references.logits(model, read))
    compared = _Compared(spec.slug)
    for start, stop in scoring_blocks(arm.layers, len(read)):
        monitor.step("score", progress[0] + start, progress[1])
        full, cached = reference.take(stop - start), arm.score(read, stop)
        compared.add(start, full, cached, None if control is None else control.score(read, stop), following[start:stop])
    arm.check_finite()
    return compared.columns()


class _Compared:
    """What comparing stretches of logits gave, one after the other; the last stretch may still be at work."""

    def __init__(self, slug: str) -> None:
        self._slug = slug
        self._parts: list[dict[str, Floats]] = []
        self._pending: tuple[int, dict[str, mx.array]] | None = None

    def add(self, start: int, full: mx.array, cached: mx.array, control: mx.array | None, following: mx.array) -> None:
        """Begin to compare logits ``[positions, vocabulary]`` from position ``start`` on, once the stretch before is done.

        Raises:
            MeasureError: logits of the stretch before are not finite.
        """
        self._finish()
        with mx.stream(COMPARING):
            full, cached = log_softmax(full), log_softmax(cached)
            part = _compare(full, cached, following)
            if control is not None:
                part |= _compare_control(full, log_softmax(control), cached)
        mx.async_eval(list(part.values()))  # type: ignore[no-untyped-call]
        self._pending = start, part

    def columns(self) -> dict[str, Floats]:
        """Return every figure by position.

        Raises:
            MeasureError: logits of the last stretch are not finite.
        """
        self._finish()
        return {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}

    def _finish(self) -> None:
        if self._pending is None:
            return
        start, arrays = self._pending
        part = {name: np.array(values.astype(mx.float32)) for name, values in arrays.items()}
        for what, name in (("full", "finite_full"), (self._slug, "finite")):
            finite = part.pop(name)
            if not finite.all():
                position = start + int(np.argmin(finite))
                raise MeasureError(f"{what}: NaN or infinity in the logits at position {position}; look at weights and dtype")
        self._parts.append(part)
        self._pending = None


def _compare(full: mx.array, cached: mx.array, following: mx.array) -> dict[str, mx.array]:
    return {
        "kl": _divergence(full, cached),
        "flips": mx.argmax(full, axis=-1) != mx.argmax(cached, axis=-1),
        "loss": -mx.take_along_axis(cached, following[:, None], axis=-1)[:, 0],
        "loss_full": -mx.take_along_axis(full, following[:, None], axis=-1)[:, 0],
        # one logit that is not finite makes the sum so
        "finite": mx.isfinite(mx.sum(cached, axis=-1)),
        "finite_full": mx.isfinite(mx.sum(full, axis=-1)),
    }


def _compare_control(full: mx.array, control: mx.array, cached: mx.array) -> dict[str, mx.array]:
    return {
        "control_kl": _divergence(full, control),
        "control_flips": mx.argmax(full, axis=-1) != mx.argmax(control, axis=-1),
        "kernel_kl": _divergence(control, cached),
    }


class _Reader:
    """The reference's parts, read in portions of any length."""

    def __init__(self, parts: Iterator[mx.array]) -> None:
        self._parts = parts
        self._rest: mx.array | None = None

    def take(self, count: int) -> mx.array:
        taken = [] if self._rest is None else [self._rest]
        while sum(part.shape[0] for part in taken) < count:
            taken.append(next(self._parts))
        whole = mx.concatenate(taken) if len(taken) > 1 else taken[0]
        self._rest = whole[count:] if whole.shape[0] > count else None
        return whole[:count]


def _require_coverage(first: int, length: int, spec: CacheSpec) -> None:
    coverage = max(0, length - first) / length
    if coverage < LEAST_COVERAGE:
        raise MeasureError(
            f"{spec.slug}: nothing was tested: {max(0, length - first)} of {length} positions see a quantised key "
            f"({coverage:.0%}, at least {LEAST_COVERAGE:.0%} must): score sequences of {2 * first} tokens or more"
        )


def _buckets(scores: Scores) -> Iterator[DepthBucket]:
    length = scores.kl.shape[1]
    start, stop = 0, FIRST_BUCKET
    while start < length:
        inside = slice(max(start, scores.first), min(stop, length))
        kl: Any = scores.kl[:, inside]
        if kl.size:
            yield DepthBucket(
                start=inside.start,
                stop=inside.stop,
                positions=kl.size,
                kl_mean=float(kl.mean()),
                flip_rate=float(scores.flips[:, inside].mean()),
            )
        start, stop = stop, 2 * stop
