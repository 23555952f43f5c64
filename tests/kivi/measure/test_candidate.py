"""A candidate's bytes are those of live arrays, its bits those of its codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kivi.measure.arms import Arm, batch
from kivi.measure.candidate import bits_a_number, judge_candidate, layer_shapes, live_bytes, quantized_layers
from kivi.measure.memory import cache_bytes
from kivi.measure.monitor import Monitor
from kivi.measure.quality import score, summarise
from kivi.measure.reference import ReferenceStore
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

Tiny = Callable[..., LoadedModel]
BY_LAYER = CacheSpec.checked(
    {"key_bits": 3, "residual_length": 32, "layers": {0: {"key_bits": 4, "value_bits": 8}, 2: {"rotate": "both"}}}
)
SPECS = [
    BY_LAYER,
    CacheSpec.parse("kivi:bits=2,sinks=32"),
    CacheSpec.parse("mlx-quantized:bits=4,group=32"),
    CacheSpec(kind="full"),
]


def tokens(count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, 256, count)]


SLIDING = CacheSpec.checked({"layers": {1: {"key_bits": 4}}})  # of gpt_oss, whose even layers keep a sliding window


@pytest.mark.parametrize(
    ("architecture", "spec"), [*(("llama", spec) for spec in SPECS), ("gpt_oss", SLIDING), ("gpt_oss", CacheSpec(kind="full"))]
)
def test_bytes_are_those_of_a_prefilled_model(tiny: Tiny, architecture: str, spec: CacheSpec) -> None:
    model = tiny(architecture)
    arm = Arm(model, spec)
    arm.prefill(batch([tokens(300)]))
    held = sum(cache_bytes(cache).resident for cache in arm.caches)
    assert live_bytes(model, spec, layer_shapes(model), 300) == pytest.approx(held, rel=0.02)


def test_bits_count_codes_scales_and_zeros_over_layers(tiny: Tiny) -> None:
    model = tiny()
    shapes, layers = layer_shapes(model), quantized_layers(model, SPECS[0])
    assert layers == (0, 1, 2)
    plain = [(3, 2), (3, 2), (4, 8)]
    assert bits_a_number(BY_LAYER, shapes, layers, 3) == pytest.approx(1 + sum(map(sum, plain)) / 6)
    assert bits_a_number(SPECS[1], shapes, layers, 3) == 3
    assert bits_a_number(SPECS[2], shapes, layers, 3) == 6  # scales and biases in float32
    assert bits_a_number(CacheSpec.parse("kivi:bits=2,group=64"), shapes, layers, 3) == pytest.approx((2.5 + 2 * 2.5) / 2)


def test_a_candidate_is_judged_from_the_same_position_as_others_without_its_kernels(
    tiny: Tiny, references: ReferenceStore, monitor: Monitor
) -> None:
    model, read = tiny(), [tokens(201)]
    spec = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
    whole = score(model, read, spec, references=references, monitor=monitor)
    fields = {"cell_key": "k", "family": "uniform", "bits": 3, "bytes_per_token": 100, "context": 300}
    judged = judge_candidate(model, read, spec, start=95, seed=0, references=references, monitor=monitor, **fields)
    expected = summarise(replace(whole, first=95, kl=whole.control_kl, flips=whole.control_flips), 0)
    assert judged.quality.positions == 105
    assert judged.quality.kl_mean == pytest.approx(expected.kl_mean, rel=1e-3)
    assert judged.quality.control_kl_mean is None
