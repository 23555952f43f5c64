"""Allocations of the sizes in between: where the answer changes, and where a budget of bytes ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kivi.measure.candidate import Candidate, bits_a_number, live_bytes
from tasks.judge.gate import TIERS
from tasks.tune.answer import front, promised_tier
from tasks.tune.candidates import SIZES, Planned, by_layer
from tasks.tune.config import TuneConfig
from tasks.tune.sensitivity import Sensitivities
from tasks.tune.subject import Subject

STEP = 0.04  # of the bits a number: allocations that differ by less are taken for equal
LARGEST = 8.5  # bits a number of 8-bit codes


def fitting(subject: Subject, sensitivities: Sensitivities, config: TuneConfig, most: float) -> Iterator[Planned]:
    """Yield the largest allocations within ``most`` bytes a token, one a window, where there are any."""
    numbers = sum(subject.shapes[layer].numbers for layer in subject.layers)
    for window in SIZES:
        least = by_layer(subject, sensitivities, 0.0, window).spec
        size = live_bytes(subject.model, least, subject.shapes, config.context)
        tokens = least.quantized_tokens(config.context)
        if size > most * config.context or not tokens:
            continue
        bits = bits_a_number(least, subject.shapes, subject.layers, subject.identity.layers)
        bits += 8 * (most * config.context - size) / (numbers * tokens)
        yield by_layer(subject, sensitivities, min(LARGEST, bits), window)


def between(
    subject: Subject, sensitivities: Sensitivities, config: TuneConfig, candidates: Sequence[Candidate]
) -> list[Planned]:
    """Return allocations half-way between the smallest that does and the largest smaller one that does not, for each aim.

    The window is that of the smallest cache that does. There are none where the two are closer than :data:`STEP` of their bits.
    """
    planned: dict[str, Planned] = {}
    for reaches in _aims(config):
        reached = [one for one in front(candidates) if reaches(one)]
        if not reached or reached[0].family == "mlx-lm":
            continue
        window, bits = reached[0].spec.residual_length, reached[0].bits
        below = [
            one.bits
            for one in candidates
            if one.family == "by layer" and one.spec.residual_length == window and one.bits < bits and not reaches(one)
        ]
        if below and bits - max(below) > STEP * bits:
            one = by_layer(subject, sensitivities, (bits + max(below)) / 2, window)
            planned[one.spec.slug] = one
    known = {one.spec.slug for one in candidates}
    return [one for slug, one in planned.items() if slug not in known]


def _aims(config: TuneConfig) -> Iterator[Callable[[Candidate], bool]]:
    """Yield whether a candidate does, for each thing that a tuning looks for and that has no size given."""
    if config.kl is not None:
        limit = config.kl
        yield lambda one: one.quality.kl_mean <= limit
    elif config.budget is None:
        for wanted in TIERS[:-1]:
            most = TIERS.index(wanted)
            yield lambda one, most=most: TIERS.index(promised_tier(one.quality)) <= most  # type: ignore[misc]
