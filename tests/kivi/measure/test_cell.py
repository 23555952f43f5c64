from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache
from pydantic import ValidationError

from kivi.accounting import CacheBytes
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.measure import MeasureError
from kivi.measure.arms import Arm
from kivi.measure.audit.cell import audit_cell
from kivi.measure.cell import measure_cell
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.measure.quality import Scores
from kivi.measure.reference import ReferenceStore
from kivi.measure.results import CellResult, Finding, metric_values
from kivi.measure.settings import GenerationSettings, MeasureSettings, ScoreSettings
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

import mlx.core as mx  # isort: skip  after kivi, which loads OpenBLAS first

Tiny = Callable[..., LoadedModel]
Measure = Callable[..., CellResult]
SPECS = [
    CacheSpec(kind="full"),
    CacheSpec.parse("kivi-roundtrip:bits=2,residual=32,backend=mlx"),
    CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx"),
    CacheSpec.parse("kivi:key_bits=4,value_bits=2,residual=0,sinks=32,backend=mlx"),
    CacheSpec.parse("mlx-quantized:bits=4,group=32"),
]
ROUNDTRIP, PACKED = SPECS[1], SPECS[2]


@pytest.fixture
def measure(tiny: Tiny, texts: list[str], references: ReferenceStore, monitor: Monitor, small: MeasureSettings) -> Measure:
    """Measure a cell of the tiny llama: ``measure(spec)``."""

    def run(spec: CacheSpec, model: LoadedModel | None = None, settings: MeasureSettings = small, **changes: Any) -> CellResult:
        arguments = {
            "cell_key": "key",
            "prompt_set": "texts",
            "prompt_sha256": "0" * 64,
            "references": references,
            "monitor": monitor,
        }
        return measure_cell(model or tiny(), texts, spec, settings, **{**arguments, **changes})

    return run


def errors(result: CellResult) -> dict[str, str]:
    return {finding.name: finding.evidence for finding in result.audit.findings if finding.severity == "error"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
def test_an_honest_cell_passes_and_is_the_same_after_json(spec: CacheSpec, measure: Measure) -> None:
    result = measure(spec)
    assert errors(result) == {}
    assert result.audit.passed
    assert CellResult.model_validate_json(result.model_dump_json()) == result
    assert result.spec == spec
    assert result.throughput is None
    values = dict(metric_values(result))
    assert all(math.isfinite(value) for value in values.values())
    assert values["audit.passed"] == 1
    assert ("quality.kernel_kl_mean" in values) == (spec.kind == "kivi")
    memory = result.memory
    assert memory.resident_bytes == memory.held_bytes == result.audit.bytes.resident
    assert sum(memory.layer_bytes) == memory.resident_bytes
    assert memory.tokens == 2 * (80 + 6 - 1 + 2)
    assert memory.full_bytes == memory.tokens * 3 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head_dim, float32
    assert result.accounting.full_key_bytes == result.accounting.full_value_bytes == memory.full_bytes // 2


def test_bits_of_a_number_are_those_of_codes_scales_and_zeros(measure: Measure) -> None:
    assert measure(PACKED).accounting.average_bits == 2 + 2 * 16 / 32
    assert measure(ROUNDTRIP).accounting.average_bits == 2 + 2 * 16 / 32
    assert measure(SPECS[4]).accounting.average_bits == 4 + 2 * 32 / 32  # mlx-lm's scales have the dtype of the keys
    assert measure(SPECS[0]).accounting.average_bits == 32


def test_the_round_trip_cache_saves_nothing_and_says_so(measure: Measure) -> None:
    full, roundtrip = measure(SPECS[0]), measure(ROUNDTRIP)
    assert roundtrip.memory.resident_bytes == full.memory.resident_bytes
    assert roundtrip.accounting.compression_ratio == 1.5  # what its tokens would weigh if they were packed


def test_provenance_names_what_was_measured_and_no_host(measure: Measure) -> None:
    import socket

    result = measure(PACKED)
    provenance = result.provenance
    assert provenance.backend == "mlx"
    assert "asked for mlx" in provenance.backend_reason
    assert provenance.layers_quantized == 3
    assert provenance.packages["mlx"]
    assert provenance.device.startswith(("cpu: ", "gpu: "))
    assert set(provenance.seconds) == {"quality", "reference", "generation", "audit"}
    assert provenance.coverage_note.startswith("65 of 128 scored positions see a quantised key (51%), in 1 sequences of 128")
    assert socket.gethostname() not in result.model_dump_json()


def test_layers_with_a_cache_of_their_own_are_listed(measure: Measure, tiny: Tiny) -> None:
    result = measure(PACKED, tiny("gpt_oss"))
    assert result.provenance.layers_quantized == 2
    assert set(result.provenance.layers_kept.values()) == {"RotatingKVCache"}
    assert result.audit.passed
    assert result.audit.findings[0].name == "layers kept"


def test_a_recurrent_models_own_caches_are_held_to_their_states_not_to_what_views_pin(measure: Measure, tiny: Tiny) -> None:
    result = measure(SPECS[0], tiny("mamba", intermediate_size=8192, hidden_size=16, state_size=1))
    assert errors(result) == {}
    assert (result.memory.growth_bytes or 0) > 1.2 * result.memory.resident_bytes  # mlx-lm's states are views


def test_a_recurrent_models_cache_that_keeps_a_copy_is_seen(
    measure: Measure, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: WeakKeyDictionary[ArraysCache, dict[int, mx.array]] = WeakKeyDictionary()

    def keep(self: ArraysCache, index: int, value: mx.array) -> None:
        self.cache[index] = value
        hidden.setdefault(self, {})[index] = value + 0
        mx.eval(hidden[self])

    monkeypatch.setattr(ArraysCache, "__setitem__", keep)
    result = measure(SPECS[0], tiny("mamba", intermediate_size=8192, hidden_size=16, state_size=1))
    assert set(errors(result)) == {"active memory"}


def test_the_zero_guard_sees_that_the_quantiser_never_ran(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundTripKIVICache, "_roundtrip", lambda *_: None)
    result = measure(ROUNDTRIP)
    assert not result.audit.passed
    assert "the quantiser never ran: over 65 positions" in errors(result)["zero guard"]


def test_the_zero_guard_sees_it_in_packed_caches_too(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KIVICache, "_flush", lambda *_: None)
    assert "the quantiser never ran: over 65 positions" in errors(measure(PACKED))["zero guard"]


def test_a_cache_that_hides_a_full_precision_copy_is_caught(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    update, weigh = KIVICache.update_and_fetch, KIVICache.bytes
    copies: dict[int, list[mx.array]] = {}

    def hoard(self: KIVICache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        copies.setdefault(id(self), []).extend([mx.array(keys), mx.array(values)])
        self.__dict__["shadow"] = {"copies": copies[id(self)]}
        return update(self, keys, values)

    def lie(self: KIVICache) -> CacheBytes:
        shadow = self.__dict__.pop("shadow")
        try:
            return weigh(self)
        finally:
            self.__dict__["shadow"] = shadow

    monkeypatch.setattr(KIVICache, "update_and_fetch", hoard)
    monkeypatch.setattr(KIVICache, "bytes", lie)
    assert "reports" in errors(measure(PACKED))["held"]


def test_a_cache_that_does_not_account_its_window_is_caught(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = KIVICache.bytes
    monkeypatch.setattr(KIVICache, "bytes", lambda self: weigh(self).model_copy(update={"residual": 0}))
    assert "resident" in errors(measure(PACKED))["byte accounting"]


def audited(arm: Arm, growth: int = 0, kl: float = 1, flips: float = 1) -> set[str]:
    """Return the errors that the audit finds in an arm were its logits as they should be."""
    some = np.ones((1, 128), np.float32)
    scores = Scores(first=63, kl=kl * some, flips=flips * some, loss=some, loss_full=some)
    audit = audit_cell(arm, scores, growth, compared=64)
    assert audit.passed == (not audit.findings)
    return {finding.name for finding in audit.findings}


@pytest.fixture
def filled(tiny: Tiny) -> Arm:
    """A packed arm after a prefill."""
    arm = Arm(tiny(), PACKED)
    arm.prefill(mx.array([list(range(100))]))
    return arm


def test_an_attribute_bits_is_caught(filled: Arm) -> None:
    assert audited(filled) == set()
    filled.caches[1].bits = 2
    assert audited(filled) == {"bits attribute"}


def test_a_layer_with_another_cache_than_the_spec_says_is_caught(filled: Arm) -> None:
    filled.caches[1] = KVCache()
    assert audited(filled) == {"class"}


@pytest.mark.parametrize(
    ("spec", "kl", "found"),
    [
        (PACKED, 2e-8, {"plausible KL"}),
        (PACKED, 2e-6, set()),
        (CacheSpec.parse("kivi:bits=8,residual=32,backend=mlx"), 2e-8, set()),
        (SPECS[0], 1e-4, {"noise of full"}),
        (SPECS[0], 1e-11, set()),
    ],
)
def test_a_kl_that_cannot_be_is_an_error(spec: CacheSpec, kl: float, found: set[str], tiny: Tiny) -> None:
    arm = Arm(tiny(), spec)
    arm.prefill(mx.array([list(range(100))]))
    assert audited(arm, kl=kl, flips=0) == found


def test_memory_that_is_not_accounted_is_caught(filled: Arm) -> None:
    assert audited(filled, growth=10_000_000) == {"active memory"}


def test_a_cell_whose_texts_are_too_short_says_how_much_is_missing(measure: Measure, small: MeasureSettings) -> None:
    settings = small.model_copy(update={"score": ScoreSettings(sequences=100, length=128)})
    with pytest.raises(MeasureError, match="100 sequences of 129 tokens need 12900 tokens, the 12 texts have"):
        measure(PACKED, settings=settings)


def test_a_spec_whose_every_layer_is_full_is_no_measurement_of_it(measure: Measure) -> None:
    layers = {str(layer): {"kind": "full"} for layer in range(3)}
    spec = CacheSpec.model_validate({"kind": "kivi", "key_bits": 2, "value_bits": 2, "backend": "mlx", "layers": layers})
    with pytest.raises(MeasureError, match="nothing would be tested: every layer keeps full precision; measure `full` instead"):
        measure(spec)


def test_a_generation_without_a_quantised_key_says_so(measure: Measure, small: MeasureSettings) -> None:
    spec = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
    short = small.model_copy(update={"generation": GenerationSettings(continuations=1, context=60, steps=4)})
    (finding,) = (finding for finding in measure(spec, settings=short).audit.findings if finding.name == "generation")
    assert (finding.severity, finding.evidence) == (
        "warning",
        "no step of the generation sees a quantised key: it ends after 63 tokens, and the first key is quantised for token 64; "
        "make measure.generation's context longer",
    )
    enough = small.model_copy(update={"generation": GenerationSettings(continuations=1, context=61, steps=4)})
    assert not [finding for finding in measure(spec, settings=enough).audit.findings if finding.name == "generation"]


def test_no_more_is_measured_than_the_model_was_made_for(measure: Measure, tiny: Tiny) -> None:
    model = tiny()
    model.config["max_position_embeddings"] = 100
    with pytest.raises(MeasureError, match="128 tokens are to be measured, and 'llama' was made for 100"):
        measure(PACKED, model)
    several_inputs = replace(model, config={"text_config": model.config})
    with pytest.raises(MeasureError, match="128 tokens are to be measured, and 'llama' was made for 100"):
        measure(PACKED, several_inputs)


def test_a_deadline_stops_the_cell(measure: Measure) -> None:
    with pytest.raises(DeadlineError, match="score: stopped at 0 of 128"):
        measure(PACKED, monitor=Monitor(deadline_s=1e-9))


def test_progress_is_reported_stage_by_stage(measure: Measure) -> None:
    stages: list[str] = []
    measure(ROUNDTRIP, monitor=Monitor(lambda stage, *_: stages.append(stage)))
    assert list(dict.fromkeys(stages)) == ["score", "reference", "generate"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_result(value: float, measure: Measure) -> None:
    content = measure(ROUNDTRIP).model_dump()
    content["quality"]["kl_mean"] = value
    with pytest.raises(ValidationError):
        CellResult.model_validate(content)


def test_a_finding_is_a_typed_record() -> None:
    with pytest.raises(ValidationError):
        Finding(name="x", severity="fatal", evidence="y")  # type: ignore[arg-type]


def test_step_mode_is_part_of_the_result_when_asked_for(measure: Measure, small: MeasureSettings) -> None:
    settings = small.model_copy(update={"score": ScoreSettings(sequences=1, length=128, step_tokens=8)})
    check = measure(PACKED, settings=settings).quality.step_check
    assert check is not None
    assert check.positions == 8


def test_the_embedded_model_is_measured_whole(
    embedded: LoadedModel, texts: list[str], references: ReferenceStore, monitor: Monitor
) -> None:
    settings = MeasureSettings(
        score=ScoreSettings(length=192), generation=GenerationSettings(continuations=2, context=160, steps=6)
    )
    result = measure_cell(
        embedded,
        texts,
        CacheSpec.parse("kivi:key_bits=4,value_bits=2,residual=32,sinks=32,backend=mlx"),
        settings,
        cell_key="key",
        prompt_set="texts",
        prompt_sha256="0" * 64,
        references=references,
        monitor=monitor,
    )
    assert errors(result) == {}
    assert result.provenance.layers_quantized == 30
    assert 0 < result.quality.kl_mean < 0.2
    assert result.quality.kernel_kl_mean is not None
    assert result.quality.kernel_kl_mean < 0.1 * result.quality.kl_mean
    assert result.generation.logit_cosine[0] > 0.98
    assert result.memory.growth_bytes == pytest.approx(result.memory.resident_bytes, rel=0.02)


def test_the_command_measures_without_any_tracker(tmp_path: Path, texts: list[str]) -> None:
    settings = MeasureSettings(
        score=ScoreSettings(length=80), generation=GenerationSettings(continuations=1, context=32, steps=2)
    ).model_dump()
    settings["throughput"] = {"rounds": 1, "contexts": [32], "steps": 2}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    code = """
import sys
from kivi.measure.__main__ import main
status = main(sys.argv[1:])
print(sorted({"prefect", "mlflow", "datasets", "matplotlib", "rich"} & set(sys.modules)))
sys.exit(status)
"""
    spec = "kivi:bits=4,residual=0,backend=mlx"
    arguments = ["embedded", "--spec", spec, "--texts", "own.jsonl", "--settings", "settings.json", "--out", "result.json"]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
    result = CellResult.model_validate_json((tmp_path / "result.json").read_text())
    assert result.spec == CacheSpec.parse(spec)
    assert result.provenance.prompt_set == "own"
    assert result.throughput is not None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--spec": "kivi:bits=5"}, "KIVI codes have 2, 3, 4 or 8 bits"),
        ({"--texts": "nowhere.txt"}, "texts 'nowhere.txt' cannot be read"),
        ({"--settings": "broken.json"}, "settings 'broken.json': scores: Extra inputs"),
        ({"--dtype": "int4"}, "dtype='int4'"),
        ({"--out": "missing/result.json"}, "out 'missing/result.json': its folder is not there"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(
    changed: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kivi.measure.__main__ import main

    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("text")
    Path("broken.json").write_text('{"scores": {}}')
    options = {"--spec": "full", "--texts": "texts.txt", "--out": "result.json", **changed}
    assert main([part for option in options.items() for part in option]) == 2
    assert message in capsys.readouterr().err
    assert not Path("result.json").exists()
