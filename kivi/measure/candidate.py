"""A candidate of a tuning: what one cache costs in bytes and in quality, beside others on the same positions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
from pydantic import NonNegativeFloat, PositiveFloat

from kivi.accounting import packed_bytes
from kivi.build import describe_layers, make_prompt_cache
from kivi.footprint import KeyValues
from kivi.measure.arms import FULL, settle
from kivi.measure.memory import cache_bytes
from kivi.measure.monitor import Monitor
from kivi.measure.quality import score, summarise
from kivi.measure.records import Record, Several
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import Quality
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

Family = Literal["uniform", "by layer", "mlx-lm"]


class Candidate(Record):
    """One cache of a model, judged on rows that no setting was chosen by."""

    cell_key: str
    family: Family
    spec: CacheSpec
    quality: Quality
    bits: PositiveFloat
    bytes_per_token: PositiveFloat
    context: Several
    seconds: NonNegativeFloat


def layer_shapes(model: LoadedModel) -> dict[int, KeyValues]:
    """Return what comes to the layers that have keys and values, by index; nothing is computed."""
    caches = make_prompt_cache(model.model, FULL)
    model.model(mx.array([[0, 0]]), cache=caches)
    given = {index: KeyValues.held(cache) for index, cache in enumerate(caches)}
    return {index: one for index, one in given.items() if one is not None}


def quantized_layers(model: LoadedModel, spec: CacheSpec) -> tuple[int, ...]:
    """Return the indices of the layers that ``spec`` quantises.

    Raises:
        AttentionError: no layer of the model can take it.
        SpecError: the model's numbers a head cannot be stored as it wants.
    """
    caches = make_prompt_cache(model.model, spec)
    kept = describe_layers(caches).kept
    return tuple(index for index in range(len(caches)) if str(index) not in kept)


def bits_a_number(spec: CacheSpec, shapes: dict[int, KeyValues], layers: Sequence[int], count: int) -> float:
    """Return the bits of a number in codes, scales and zeros included, over ``layers`` of the model's ``count``."""
    bits = numbers = 0.0
    for index in layers:
        shape, layer = shapes[index], spec.for_layer(index, count)
        numbers += shape.numbers
        if layer.kind == "mlx-quantized":
            bits += shape.numbers * (layer.key_bits + 16 * shape.key_dtype.size / layer.group_size)
        elif layer.kind == "full":
            bits += 8 * shape.size
        else:
            group = packed_bytes(layer.codecs, shape.token, rows=shape.heads, quantized=layer.group_size, exact=0, resident=0)
            bits += 8 * group.accounted / layer.group_size
    return bits / numbers


def live_bytes(model: LoadedModel, spec: CacheSpec, shapes: dict[int, KeyValues], tokens: int) -> int:
    """Return the bytes of the live arrays of a sequence of ``tokens``, over all layers that have keys and values.

    One layer's cache at a time is filled with tokens of the layer's shape, and weighed; equal layers once.
    """
    caches = make_prompt_cache(model.model, spec)
    weighed: dict[Any, int] = {}
    total = 0
    for index, shape in shapes.items():
        kind = type(caches[index]), str(spec.for_layer(index, len(caches))), shape
        if kind not in weighed:
            weighed[kind] = _weigh(caches[index], shape, tokens)
        total += weighed[kind]
    return total


def judge_candidate(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    spec: CacheSpec,
    *,
    start: int,
    seed: int,
    references: ReferenceStore,
    monitor: Monitor,
    **fields: Any,
) -> Candidate:
    """Score ``spec`` on ``sequences`` from position ``start`` on, codes dequantised; ``fields`` are the others of the result.

    Raises:
        MeasureError: as :func:`kivi.measure.quality.score`.
        DeadlineError: the deadline has passed.
    """
    began = time.perf_counter()
    scores = score(model, sequences, spec, references=references, monitor=monitor, kernels=False)
    quality = summarise(replace(scores, first=max(start, scores.first)), seed)
    return Candidate(spec=spec, quality=quality, seconds=time.perf_counter() - began, **fields)


def _weigh(cache: Any, shape: KeyValues, tokens: int) -> int:
    for count in (tokens - 1, 1):  # as after a prefill, where sliding windows have dropped what they drop
        keys = mx.zeros((1, shape.heads, count, shape.key_dim), shape.key_dtype)
        values = mx.zeros((1, shape.heads, count, shape.value_dim), shape.value_dtype)
        cache.update_and_fetch(keys, values)
        settle([cache])
    return cache_bytes(cache).resident
