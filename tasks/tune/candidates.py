"""Candidates: uniform settings, allocations by layer at several sizes, and mlx-lm's own caches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from kivi.codec import Rotate
from kivi.measure.candidate import (
    Candidate,
    Family,
    bits_a_number,
    judge_candidate,
    live_bytes,
    quantized_layers,
)
from kivi.measure.monitor import Monitor
from kivi.measure.sensitivity import SIDES, Side
from kivi.models.embedded import cache_dir
from kivi.spec import KIVI_BITS, CacheSpec, SpecError
from tasks.run.cells import Reporter, found_or_measured, references
from tasks.run.plan import circumstances, content_hash
from tasks.run.result_files import ResultStore
from tasks.tune.allocation import Option, allocate
from tasks.tune.config import TuneConfig
from tasks.tune.sensitivity import Sensitivities
from tasks.tune.subject import SINKS, WINDOW, Subject

PAIRS = ((2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4), (8, 4), (8, 8))  # bits of keys and values
VARIED = ((3, 2), (4, 3))  # of these another rotation and window are judged, too, of the last also groups and sinks
SHORT_WINDOW = 32
# Bits a number of allocations, scales and zeros included, by window.
SIZES = {WINDOW: (2.5, 2.75, 3.0, 3.25, 3.5, 4.0, 5.0), SHORT_WINDOW: (2.75, 3.0, 3.5, 4.0, 5.0)}
MLX_BITS = (3, 4, 6, 8)
SEED = 0  # of the intervals


class Planned(NamedTuple):
    """A cache that is going to be judged."""

    family: Family
    spec: CacheSpec


def plan_candidates(subject: Subject, sensitivities: Sensitivities) -> list[Planned]:
    """Return what is judged at first, each cache once; :mod:`tasks.tune.refine` adds allocations of other sizes."""
    sized = [by_layer(subject, sensitivities, bits, window) for window, sizes in SIZES.items() for bits in sizes]
    every = [*_uniform(subject, sensitivities), *sized, *_mlx_lm(subject)]
    return list({planned.spec.slug: planned for planned in reversed(every)}.values())[::-1]


def count_candidates(subject: Subject) -> int:
    """Return about how many candidates there are going to be, before sensitivities are known."""
    return len(PAIRS) + 2 * len(VARIED) + 3 + sum(map(len, SIZES.values())) + len(list(_mlx_lm(subject)))


@task(name="judge", task_run_name="judge {planned.spec.slug}", cache_policy=NO_CACHE)
def judge(planned: Planned, subject: Subject, config: TuneConfig, store: ResultStore) -> tuple[Candidate, bool]:
    """Return what one candidate comes to on the held-out rows, and whether an earlier run had measured it.

    Raises:
        CellError: it cannot be measured.
        StoreError: the result could not be kept.
    """
    key, model, spec = _key(planned, subject, config), subject.model, planned.spec

    def measure() -> Candidate:
        return judge_candidate(
            model,
            subject.judged,
            spec,
            start=subject.start,
            seed=SEED,
            references=references(cache_dir() / "references", config.reference_gb),
            monitor=Monitor(Reporter(spec.slug, key), config.deadline_s),
            cell_key=key,
            family=planned.family,
            bits=bits_a_number(spec, subject.shapes, subject.layers, subject.identity.layers),
            bytes_per_token=live_bytes(model, spec, subject.shapes, config.context) / config.context,
            context=config.context,
        )

    return found_or_measured(store, key, Candidate, spec.slug, measure)


def by_layer(subject: Subject, sensitivities: Sensitivities, bits: float, window: int) -> Planned:
    """Return the cache of the least error with ``bits`` bits a number at most; in fewer than all have, the smallest."""
    slots = [
        [_option(subject, sensitivities, layer, side, bits) for bits in KIVI_BITS] for layer in subject.layers for side in SIDES
    ]
    numbers = sum(subject.shapes[layer].numbers for layer in subject.layers)
    fewest = sum(min(option.size for option in slot) for slot in slots)
    chosen = allocate(slots, max(fewest, bits * numbers * subject.group / 8))
    return Planned("by layer", _allocated(subject.base(window), subject.layers, chosen))


def smallest(subject: Subject, context: int) -> float:
    """Return the fewest bytes a token of any candidate, which needs no judgement."""
    return min(
        live_bytes(subject.model, spec, subject.shapes, context) / context
        for spec in (_spec(subject, (2, 2), "none", window=SHORT_WINDOW, sinks=0), *(one.spec for one in _mlx_lm(subject)))
    )


def _uniform(subject: Subject, sensitivities: Sensitivities) -> Iterator[Planned]:
    rotate, other = _better_rotation(subject, sensitivities)
    for bits in PAIRS:
        yield Planned("uniform", _spec(subject, bits, rotate))
    for bits in VARIED:
        yield Planned("uniform", _spec(subject, bits, other))
        yield Planned("uniform", _spec(subject, bits, rotate, window=SHORT_WINDOW))
    yield Planned("uniform", _spec(subject, VARIED[-1], rotate, sinks=0))
    yield Planned("uniform", _spec(subject, VARIED[-1], rotate, group=32, window=SHORT_WINDOW, sinks=32))
    yield Planned("uniform", _spec(subject, (2, 2), rotate, window=SHORT_WINDOW, sinks=0))


def _mlx_lm(subject: Subject) -> Iterator[Planned]:
    for bits in MLX_BITS:
        spec = CacheSpec(kind="mlx-quantized", key_bits=bits, value_bits=bits, group_size=subject.group)
        try:
            quantized_layers(subject.model, spec)
        except SpecError:  # mlx-lm cannot hold so many numbers a head in so many bits
            continue
        yield Planned("mlx-lm", spec)


def _option(subject: Subject, sensitivities: Sensitivities, layer: int, side: Side, bits: int) -> Option:
    """Return the better of a rotated and a plain slot; they are equal in size."""
    errors = {rotated: sensitivities.error(layer, side, rotated, bits) for rotated in (False, True)}
    rotated = min((error, rotated) for rotated, error in errors.items() if error is not None)[1]
    shape = subject.shapes[layer]
    dim = shape.key_dim if side == "keys" else shape.value_dim
    codec = getattr(subject.base().model_copy(update={f"{side[:-1]}_bits": bits}).codecs, side)
    size = shape.heads * (codec.code_bytes(subject.group, dim) + codec.param_bytes(subject.group, dim))
    return Option(bits, rotated, size, errors[rotated] or 0.0)


def _allocated(base: CacheSpec, layers: Sequence[int], chosen: Sequence[Option]) -> CacheSpec:
    """Return the cache in which each layer has its own options; what most have is the whole spec's."""
    own = {
        layer: {"key_bits": keys.bits, "value_bits": values.bits, "rotate": _rotate(keys.rotated, values.rotated)}
        for layer, keys, values in zip(layers, chosen[::2], chosen[1::2], strict=True)
    }
    common: dict[str, Any] = {
        name: Counter(fields[name] for fields in own.values()).most_common(1)[0][0] for name in next(iter(own.values()))
    }
    differing = {
        layer: changes
        for layer, fields in own.items()
        if (changes := {name: value for name, value in fields.items() if value != common[name]})
    }
    return CacheSpec.model_validate({**base.model_dump(), **common, "layers": differing})


def _spec(
    subject: Subject, bits: tuple[int, int], rotate: Rotate, *, group: int = 0, window: int = WINDOW, sinks: int = SINKS
) -> CacheSpec:
    return CacheSpec(
        key_bits=bits[0],
        value_bits=bits[1],
        rotate=rotate,
        group_size=group or subject.group,
        residual_length=window,
        sink_length=sinks,
    )


def _better_rotation(subject: Subject, sensitivities: Sensitivities) -> tuple[Rotate, Rotate]:
    """Return what to rotate in a uniform cache, by the errors of whole sides at the fewest bits, and the opposite of it."""
    fewest = min(one.bits for one in sensitivities.measured)
    better = {}
    for side in SIDES:
        rotated, plain = (sensitivities.total(side, turned, fewest) for turned in (True, False))
        better[side] = rotated is not None and plain is not None and rotated < plain
    opposite: Rotate = "none" if any(better.values()) else "both"
    return _rotate(better["keys"], better["values"]), opposite if subject.rotate_both else "none"


def _rotate(keys: bool, values: bool) -> Rotate:
    if keys and values:
        return "both"
    return "keys" if keys else "values" if values else "none"


def _key(planned: Planned, subject: Subject, config: TuneConfig) -> str:
    return content_hash(
        {
            "what": "candidate",
            "model": [subject.identity.digest, subject.identity.dtype],
            "tokens": hashlib.sha256(json.dumps(subject.judged).encode()).hexdigest(),
            "spec": [planned.family, planned.spec.model_dump(mode="json")],
            "judged": [subject.start, config.context, SEED],
            **circumstances().model_dump(mode="json"),
        }
    )
