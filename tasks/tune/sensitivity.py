"""Sensitivities as kept results: each measured once, whatever ends the process in between."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from kivi.measure.monitor import Monitor
from kivi.measure.sensitivity import SIDES, Sensitivity, SensitivityProbe, Side
from tasks.run.cells import Reporter, found_or_measured
from tasks.run.plan import circumstances, content_hash
from tasks.run.result_files import ResultStore
from tasks.tune.config import Effort
from tasks.tune.subject import CALIBRATION_WINDOW, Subject

LABEL = "sensitivity"


class Sensitivities:
    """All that were measured, by layer, side and rotation; errors of other bits follow from those of the nearest."""

    def __init__(self, measured: list[Sensitivity]) -> None:
        self.measured = measured
        self._errors = {(one.layer, one.side, one.rotated, one.bits): max(0.0, one.kl_mean) for one in measured}

    def error(self, layer: int, side: Side, rotated: bool, bits: int) -> float | None:
        """Return the KL of one side of one layer; None where nothing of this rotation was measured."""
        known = [at for *where, at in self._errors if where == [layer, side, rotated]]
        if not known:
            return None
        nearest = min(known, key=lambda at: (abs(at - bits), -at))
        # The error of a code goes with the square of one over the largest code.
        return self._errors[layer, side, rotated, nearest] * (((1 << nearest) - 1) / ((1 << bits) - 1)) ** 2

    def total(self, side: Side, rotated: bool, bits: int) -> float | None:
        """Return the sum over layers, the error of a whole side."""
        layers = {one.layer for one in self.measured}
        errors = [self.error(layer, side, rotated, bits) for layer in layers]
        return None if None in errors else sum(error for error in errors if error is not None)


@task(name=LABEL, cache_policy=NO_CACHE)
def measure_sensitivities(
    subject: Subject,
    effort: Effort,
    store: ResultStore,
    *,
    deadline_s: float,
    done: Callable[[float], None] = lambda _: None,
) -> Sensitivities:
    """Measure each side of each layer as codes, each time with the host's accelerator; what ``store`` has is taken from there.

    Args:
        subject: The model and the calibration text.
        effort: Which bits and rotations.
        store: Where results are kept.
        deadline_s: Seconds after which it stops.
        done: Called after each measurement with the seconds that it took; 0 for one that was found.
    """
    found: list[Sensitivity] = []
    base = subject.base(CALIBRATION_WINDOW)
    probe = functools.cache(lambda: SensitivityProbe(subject.model, subject.calibration, base))  # read once it is needed
    monitor = Monitor(Reporter(LABEL, "sensitivity"), deadline_s)
    for bits in effort.bits:
        wanted = list(_wanted(subject, effort, Sensitivities(found), bits))
        for number, (layer, side, rotated) in enumerate(wanted):
            monitor.step(f"{bits} bits", number, len(wanted))
            key, began = _key(subject, layer, side, bits, rotated), time.perf_counter()
            measure = functools.partial(_measure, probe, key, layer, side, bits, rotated)
            one, kept = found_or_measured(store, key, Sensitivity, f"sensitivity of layer {layer}", measure)
            found.append(one)
            done(0.0 if kept else time.perf_counter() - began)
    return Sensitivities(found)


def _measure(probe: Callable[[], SensitivityProbe], key: str, layer: int, side: Side, bits: int, rotated: bool) -> Sensitivity:
    reader = probe()
    kl = reader.measure(layer, side, bits, rotated)
    fields = {"layer": layer, "side": side, "bits": bits, "rotated": rotated, "positions": reader.positions}
    return Sensitivity(cell_key=key, kl_mean=kl, **fields)


def count_sensitivities(subject: Subject, effort: Effort) -> int:
    """Return how many measurements :func:`measure_sensitivities` makes."""
    both = len(subject.layers) * (len(SIDES) + len(subject.rotatable))
    one = len(subject.layers) * len(SIDES)
    return both * len(effort.bits) if effort.every_rotation else both + one * (len(effort.bits) - 1)


def candidate_over_sensitivity(subject: Subject, effort: Effort) -> float:
    """Return about how many times as long as a sensitivity a candidate takes, before one was timed.

    A sensitivity runs half of the layers in one call, a candidate all of them in calls of 32 tokens, half as long again.
    """
    judged = sum(map(len, subject.judged))
    return 3 * judged / effort.tokens


def _wanted(subject: Subject, effort: Effort, known: Sensitivities, bits: int) -> Iterator[tuple[int, Side, bool]]:
    """Yield layer, side and rotation of each measurement; after the first bits, unless every one is wanted, the better."""
    first = bits == effort.bits[0]
    for layer in _from_both_ends(subject.layers):
        for side in SIDES:
            rotations = [False, True] if side in subject.rotatable else [False]
            if not first and not effort.every_rotation:
                rotations = [min(rotations, key=lambda rotated: known.error(layer, side, rotated, bits) or 0.0)]
            for rotated in rotations:
                yield layer, side, rotated


def _from_both_ends(layers: Sequence[int]) -> Iterator[int]:
    """Yield the first, the last, the second and so on: early layers take longest, so times are even from the start."""
    for number in range(len(layers)):
        yield layers[number // 2] if number % 2 == 0 else layers[-1 - number // 2]


def _key(subject: Subject, layer: int, side: Side, bits: int, rotated: bool) -> str:
    return content_hash(
        {
            "what": "sensitivity",
            "model": [subject.identity.digest, subject.identity.dtype],
            "tokens": hashlib.sha256(json.dumps(subject.calibration).encode()).hexdigest(),
            "base": subject.base(CALIBRATION_WINDOW).model_dump(mode="json"),
            "measured": [layer, side, bits, rotated],
            **circumstances().model_dump(mode="json"),
        }
    )
