from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kivi.measure.arms import FULL, Arm, batch
from kivi.measure.generation import decode, reference_trajectory, repetition_rate, summarise
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.quality import divergence
from kivi.measure.reference import ReferenceStore
from kivi.measure.sequences import TokenStream
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache

Tiny = Callable[..., LoadedModel]
Prompts = list[list[int]]
STEPS = 12
ROUGH = [
    CacheSpec.parse("kivi-roundtrip:bits=2,residual=0,backend=mlx"),
    CacheSpec.parse("kivi:bits=2,residual=0,backend=mlx"),
    CacheSpec.parse("mlx-quantized:bits=2,group=32"),
]


@pytest.fixture
def prompts(byte_tokenizer: object, texts: list[str]) -> Prompts:
    return TokenStream(byte_tokenizer, texts).windows(3, 70)


def test_the_full_cache_follows_itself(tiny: Tiny, prompts: Prompts, references: ReferenceStore, monitor: Monitor) -> None:
    model = tiny()
    reference = reference_trajectory(model, prompts, STEPS, references=references, monitor=monitor)
    figures = summarise(model, prompts, reference, decode(Arm(model, FULL), prompts, reference, monitor))
    assert figures.token_agreement == 1
    assert figures.first_divergence == STEPS
    assert figures.logit_cosine == pytest.approx([1] * STEPS)
    assert figures.logit_cosine_free == figures.logit_cosine
    assert max(figures.step_kl) < 1e-9
    assert [c.first_divergence for c in figures.continuations] == [None] * 3
    assert all(c.text == c.reference for c in figures.continuations)


@pytest.mark.parametrize("spec", ROUGH, ids=lambda spec: spec.slug)
def test_one_run_until_tokens_differ_equals_two_runs(
    spec: CacheSpec, tiny: Tiny, prompts: Prompts, references: ReferenceStore, monitor: Monitor
) -> None:
    model = tiny()
    reference = reference_trajectory(model, prompts, STEPS, references=references, monitor=monitor)
    decoded = decode(Arm(model, spec), prompts, reference, monitor)
    assert not np.array_equal(decoded.tokens, reference.tokens), "nothing diverged: the case tests nothing"

    forced, free = Arm(model, spec), Arm(model, spec)
    logits = forced.prefill(batch(prompts))
    tokens = [mx.argmax(free.prefill(batch(prompts)), axis=-1)]
    for step in range(STEPS):
        expected = float(mx.mean(divergence(mx.array(reference.logits[step]), logits)))
        assert decoded.kl[step] == pytest.approx(expected, rel=1e-4)
        logits = forced.decode(mx.array(reference.tokens[:, step])[:, None])
        tokens.append(mx.argmax(free.decode(tokens[-1][:, None]), axis=-1))
    assert np.array_equal(decoded.tokens, np.array(mx.stack(tokens[:STEPS], axis=1)))

    figures = summarise(model, prompts, reference, decoded)
    steps = [STEPS if one.first_divergence is None else one.first_divergence for one in figures.continuations]
    assert steps == [STEPS if row.all() else list(row).index(False) for row in decoded.tokens == reference.tokens]
    assert figures.first_divergence == pytest.approx(np.mean(steps))


def test_caches_end_with_what_was_fed(tiny: Tiny, prompts: Prompts, references: ReferenceStore, monitor: Monitor) -> None:
    model = tiny()
    reference = reference_trajectory(model, prompts, STEPS, references=references, monitor=monitor)
    for spec in [FULL, *ROUGH]:
        arm = Arm(model, spec)
        decoded = decode(arm, prompts, reference, monitor)
        assert {cache.offset for cache in arm.caches} == {decoded.fed}
        assert decoded.peak_prefill > 0 < decoded.peak_decode


def test_mlx_lms_quantised_cache_is_prefilled_as_mlx_lm_does_it(tiny: Tiny, prompts: Prompts) -> None:
    model = tiny()
    arm = Arm(model, CacheSpec.parse("mlx-quantized:bits=2,group=32"))
    logits = arm.prefill(batch(prompts[:1]))
    options = {"max_tokens": 2, "kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": 0}
    (_, expected), _ = generate_step(mx.array(prompts[0]), model.model, **options)
    assert mx.allclose(logits[0] - mx.logsumexp(logits[0]), expected, atol=1e-5).item()
    assert {type(cache) for cache in arm.caches} == {QuantizedKVCache}


def test_a_deadline_stops_generation(tiny: Tiny, prompts: Prompts, references: ReferenceStore, monitor: Monitor) -> None:
    model = tiny()
    reference = reference_trajectory(model, prompts, STEPS, references=references, monitor=monitor)
    with pytest.raises(DeadlineError, match="generate: stopped at 0 of 12"):
        decode(Arm(model, FULL), prompts, reference, Monitor(deadline_s=1e-9))


def test_repetition_counts_four_tokens_that_came_before_in_the_same_row() -> None:
    assert repetition_rate(np.array([[1, 2, 3, 4, 5, 6, 7]])) == 0
    assert repetition_rate(np.array([[1, 1, 1, 1, 1, 1, 1]])) == pytest.approx(3 / 4)
    assert repetition_rate(np.array([[1, 2, 3, 4], [1, 2, 3, 4]])) == 0
    assert repetition_rate(np.array([[1, 2]])) == 0
