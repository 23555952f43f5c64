from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.backends import mlx as mlx_backend
from kivi.measure import MeasureError
from kivi.measure.arms import Arm
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.quality import Scores, check_steps, divergence, score, summarise
from kivi.measure.reference import ReferenceStore
from kivi.measure.sequences import TokenStream
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

Tiny = Callable[..., LoadedModel]
ROUNDTRIP = CacheSpec.parse("kivi-roundtrip:bits=2,residual=32,backend=mlx")
PACKED = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
OUTLIER = 7  # the token whose keys are huge


def draw_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(OUTLIER + 1, 256, count)]


def with_outlier(model: LoadedModel) -> LoadedModel:
    """Give token 7 a channel of its own, which the first layer's keys amplify."""
    embedding = model.model.model.embed_tokens
    weight = np.array(embedding.weight)
    weight[:, 0] = 0
    weight[OUTLIER] = 0
    weight[OUTLIER, 0] = 10
    embedding.weight = mx.array(weight)
    projection = model.model.model.layers[0].self_attn.k_proj
    amplified = np.array(projection.weight)
    amplified[:, 0] = 500
    projection.weight = mx.array(amplified)
    return model


@pytest.mark.parametrize("spec", [ROUNDTRIP, PACKED, CacheSpec.parse("kivi-roundtrip:bits=2,residual=0,backend=mlx")])
def test_a_huge_key_in_the_future_of_a_query_does_not_reach_it(
    spec: CacheSpec, tiny: Tiny, references: ReferenceStore, monitor: Monitor
) -> None:
    model = with_outlier(tiny())
    plain = draw_tokens(161)
    planted = [*plain[:100], OUTLIER, *plain[101:]]
    one, other = (score(model, [tokens], spec, references=references, monitor=monitor) for tokens in (plain, planted))
    assert np.array_equal(one.kl[:, :100], other.kl[:, :100])
    assert not np.allclose(one.kl[:, 100:], other.kl[:, 100:])


def test_in_one_long_call_the_round_trip_cache_does_leak(tiny: Tiny) -> None:
    """The trap that the cuts avoid: without them the test above could not fail."""
    model = with_outlier(tiny())
    plain = draw_tokens(160)
    planted = [*plain[:100], OUTLIER, *plain[101:]]
    one, other = (Arm(model, ROUNDTRIP).feed(tokens, [(0, 160)])[:100] for tokens in (plain, planted))
    assert mx.max(mx.abs(one - other)).item() > 0.1


def test_a_packed_cache_is_scored_on_its_codes_and_the_control_is_not(
    tiny: Tiny, references: ReferenceStore, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    attend = mlx_backend.MLXBackend.decode_attention

    def noting(self: mlx_backend.MLXBackend, queries: mx.array, *args: Any, **options: Any) -> mx.array:
        lengths.append(queries.shape[-2])
        return attend(self, queries, *args, **options)

    monkeypatch.setattr(mlx_backend.MLXBackend, "decode_attention", noting)
    model = tiny()
    score(model, [draw_tokens(161)], PACKED, references=references, monitor=monitor)
    assert lengths == [length for length in (32, 32, 32, 1) for _ in range(len(model.model.layers))]


def test_under_half_coverage_nothing_was_tested(tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> None:
    spec = CacheSpec.parse("kivi-roundtrip:bits=2,residual=128,backend=mlx")
    with pytest.raises(MeasureError, match=r"nothing was tested: 97 of 256 positions see a quantised key \(38%, at least 50%"):
        score(tiny(), [draw_tokens(257)], spec, references=references, monitor=monitor)


def test_figures_are_over_the_positions_that_see_a_quantised_key(
    tiny: Tiny, references: ReferenceStore, monitor: Monitor
) -> None:
    scores = score(tiny(), [draw_tokens(161)], ROUNDTRIP, references=references, monitor=monitor)
    figures = summarise(scores, seed=0)
    assert np.all(scores.kl[:, :63] == 0)  # 32 of the window and 31 of an unfinished group: all exact
    assert np.all(scores.kl[:, 63:] > 0)
    assert figures.positions == 160 - 63
    assert figures.coverage == pytest.approx(97 / 160)
    assert figures.kl_mean == pytest.approx(scores.kl[:, 63:].mean())
    assert sum(bucket.positions for bucket in figures.by_depth) == figures.positions
    assert figures.by_depth[0].start == 63


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_oss"])
def test_a_full_cache_differs_from_itself_by_float_noise_alone(
    architecture: str, tiny: Tiny, references: ReferenceStore, monitor: Monitor
) -> None:
    figures = summarise(
        score(tiny(architecture), [draw_tokens(161)], CacheSpec(kind="full"), references=references, monitor=monitor), seed=0
    )
    assert figures.kl_max < (1e-9 if mx.default_device() == mx.cpu else 1e-4)  # CUDA multiplies in TF32
    assert figures.flip_rate == 0
    assert figures.coverage == 1
    assert figures.perplexity == pytest.approx(figures.perplexity_full, rel=1e-4)


@pytest.mark.parametrize("spec", [ROUNDTRIP, PACKED])
def test_scoring_in_chunks_is_decoding(spec: CacheSpec, tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> None:
    model, tokens = tiny(), draw_tokens(161)
    scores = score(model, [tokens], spec, references=references, monitor=monitor)
    check = check_steps(model, tokens, spec, scores, 80, references=references, monitor=monitor)
    assert check.positions == 80
    assert check.kl_mean_steps == pytest.approx(check.kl_mean_chunks, rel=1e-2)
    assert check.largest_difference < 1e-2 * check.kl_mean_chunks


def test_packed_and_round_trip_caches_make_the_same_error(tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> None:
    tokens = [draw_tokens(161)]
    roundtrip, packed = (
        summarise(score(tiny(), tokens, spec, references=references, monitor=monitor), 0) for spec in (ROUNDTRIP, PACKED)
    )
    assert packed.control_kl_mean == pytest.approx(roundtrip.kl_mean, rel=1e-2)
    assert packed.kl_mean == pytest.approx(roundtrip.kl_mean, rel=1e-2)
    assert packed.kernel_kl_mean is not None
    assert packed.kernel_kl_mean < 1e-3 * packed.kl_mean
    assert roundtrip.control_kl_mean is None


def test_not_finite_logits_stop_the_cell_with_their_position(tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> None:
    model = tiny(tie_word_embeddings=False)
    tokens = draw_tokens(129)
    tokens[70] = OUTLIER
    weight = np.array(model.model.model.embed_tokens.weight)
    weight[OUTLIER] = np.nan
    model.model.model.embed_tokens.weight = mx.array(weight)
    # A share of zero times a value of NaN is NaN, so that the queries before it in the same call have it too.
    with pytest.raises(MeasureError, match="full: NaN or infinity in the logits at position 63"):
        score(model, [tokens], CacheSpec.parse("mlx-quantized:bits=8,group=32"), references=references, monitor=monitor)


def test_a_deadline_stops_scoring(tiny: Tiny, references: ReferenceStore) -> None:
    with pytest.raises(DeadlineError, match="score: stopped at 31 of 160"):
        score(tiny(), [draw_tokens(161)], ROUNDTRIP, references=references, monitor=Monitor(_after(31), deadline_s=1e6))


def _after(position: int) -> Callable[[str, int, int], None]:
    """Let time pass when ``position`` is reached."""

    def report(stage: str, done: int, total: int) -> None:
        if done >= position:
            raise DeadlineError(f"{stage}: stopped at {done} of {total}")

    return report


logits = st.integers(0, 2**32 - 1)


@given(logits, st.sampled_from([1e-3, 0.1, 3.0]))
def test_kl_agrees_with_double_precision_and_is_never_negative(seed: int, distance: float) -> None:
    rng = np.random.default_rng(seed)
    first = rng.normal(0, 4, (3, 500)).astype(np.float32)
    second = (first + distance * rng.normal(0, 1, first.shape)).astype(np.float32)
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (first.astype(np.float64), second.astype(np.float64)))
    expected = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    measured = np.array(divergence(mx.array(first), mx.array(second)))
    np.testing.assert_allclose(measured, expected, rtol=1e-3, atol=1e-11)
    assert (measured >= 0).all()


def test_intervals_are_those_of_the_seed(tiny: Tiny, references: ReferenceStore, monitor: Monitor) -> None:
    scores = score(tiny(), [draw_tokens(321)], ROUNDTRIP, references=references, monitor=monitor)
    first, again, other = (summarise(scores, seed).kl_interval for seed in (1, 1, 2))
    assert first is not None
    assert first == again != other
    assert first.low < summarise(scores, 1).kl_mean < first.high
    assert first.method == "percentile bootstrap, 2000 resamples of 8 blocks of 32 positions"


def test_twenty_sequences_are_resampled_whole() -> None:
    rng = np.random.default_rng(0)
    kl = rng.random((20, 50)).astype(np.float32)
    figures = summarise(Scores(first=10, kl=kl, flips=np.zeros_like(kl), loss=kl, loss_full=kl), seed=0)
    assert figures.sequence_kl == pytest.approx(kl[:, 10:].mean(axis=1).tolist())
    assert figures.kl_interval is not None
    assert figures.kl_interval.method.endswith("of 20 sequences")


def test_the_embedded_model_orders_bits_as_it_should(
    embedded: LoadedModel, texts: list[str], references: ReferenceStore, monitor: Monitor
) -> None:
    sequences = TokenStream(embedded.tokenizer, texts).pack(1, 257)
    figures = {
        bits: summarise(
            score(
                embedded,
                sequences,
                CacheSpec.parse(f"kivi-roundtrip:bits={bits},residual=32,backend=mlx"),
                references=references,
                monitor=monitor,
            ),
            seed=0,
        )
        for bits in (2, 4, 8)
    }
    assert 0.05 < figures[2].kl_mean < 1
    assert 0.0005 < figures[4].kl_mean < 0.02
    assert 1e-7 < figures[8].kl_mean < 0.0005
    assert figures[2].flip_rate > figures[4].flip_rate >= figures[8].flip_rate


def test_chunks_decode_the_embedded_model_as_steps_do(
    embedded: LoadedModel, texts: list[str], references: ReferenceStore, monitor: Monitor
) -> None:
    spec = CacheSpec.parse("kivi:key_bits=4,value_bits=2,residual=0,backend=mlx")
    tokens = TokenStream(embedded.tokenizer, texts).pack(1, 129)[0]
    scores = score(embedded, [tokens], spec, references=references, monitor=monitor)
    check = check_steps(embedded, tokens, spec, scores, 12, references=references, monitor=monitor)
    assert check.kl_mean_steps == pytest.approx(check.kl_mean_chunks, rel=0.02)


def test_a_second_score_finds_the_logits_of_the_first(tiny: Tiny, tmp_path: Path, monitor: Monitor) -> None:
    tokens, model = draw_tokens(161), tiny()
    first = score(model, [tokens], PACKED, references=ReferenceStore(tmp_path, 10**9), monitor=monitor)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert kept
    second = score(model, [tokens], PACKED, references=ReferenceStore(tmp_path, 10**9), monitor=monitor)
    assert np.array_equal(first.kl, second.kl)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == kept
