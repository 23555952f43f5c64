"""The comparison: one typed result of everything that ran here, and a sentence for everything that did not."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from kivi.backends import available, resolve
from kivi.measure.arms import FULL, Arm
from kivi.measure.backends.__main__ import main
from kivi.measure.backends.comparison import (
    BackendState,
    ComparisonResult,
    ComparisonSettings,
    agreement,
    compare_backends,
)
from kivi.measure.backends.skip_reason import not_run
from kivi.measure.backends.speed import SpeedSettings, time_model
from kivi.spec import CacheSpec, SpecError

SETTINGS = ComparisonSettings(
    speed=SpeedSettings(
        rounds=2, calls=1, dtype="float32", kv_heads=1, query_heads=2, head_dim=32, flush_tokens=(32,), contexts=(96,)
    ),
    parity_shapes=((1, 64, 32),),
)
SPECS = [CacheSpec.parse("kivi:bits=2,residual=32"), CacheSpec.parse("kivi-roundtrip:bits=4,residual=32")]


@pytest.fixture(scope="module")
def result() -> ComparisonResult:
    return compare_backends(SPECS, settings=SETTINGS)


def test_every_backend_is_compared_or_says_why_not(result):
    assert [backend.name for backend in result.backends] == ["metal", "cuda", "mlx"]
    ran = {backend.name for backend in result.backends if backend.available}
    assert "mlx" in ran
    for spec in result.specs:
        assert {check.backend for check in spec.parity} == ran
    for backend in result.backends:
        assert backend.available == available(backend.name).ok
        mentioned = any(line.startswith(f"{backend.name}: not run: ") for line in result.not_run)
        assert mentioned == (not backend.available)


def test_parity_speed_and_provenance_are_in_one_result(result):
    assert result.passed and result.problems == []
    packed, roundtrip = result.specs
    assert {check.dtype for check in packed.parity} == {"float32", "float16", "bfloat16"}
    assert {case.operation for case in packed.speed} == {"round trip", "quantise and pack", "decode attention"}
    assert {case.operation for case in roundtrip.speed} == {"round trip"}
    assert result.packages["mlx"] and result.device and result.git_sha and result.started.tzinfo


def test_a_result_is_read_again_as_it_was_written(result):
    text = result.model_dump_json()
    assert ComparisonResult.model_validate_json(text) == result
    assert json.loads(text)["schema_version"] == 1


def test_a_parity_check_that_does_not_hold_fails_the_comparison(result):
    spec = result.specs[0]
    wrong = spec.parity[0].model_copy(update={"differing": 3, "max_abs": 0.5, "max_ulps": 9})
    broken = result.model_copy(update={"specs": [spec.model_copy(update={"parity": [wrong, *spec.parity[1:]]})]})
    assert not broken.passed
    (problem,) = broken.problems
    assert "round trip of keys" in problem and "3 of 2,048 elements differ" in problem and "9 ULPs" in problem


def test_what_is_measured_is_saved_after_each_stage_and_is_not_taken_for_the_whole(tmp_path):
    """A machine that is taken away between stages leaves the stages that were through, and they do not pass."""
    saved: list[ComparisonResult] = []
    result = compare_backends(SPECS, settings=SETTINGS, save=saved.append)
    assert [(len(part.specs), bool(part.specs[-1].speed)) for part in saved] == [(1, False), (1, True), (2, False), (2, True)]
    assert result.ended and result.passed and result.specs == saved[-1].specs
    for part in saved:
        assert not part.passed and part.problems == ["the comparison was stopped before its last stage was through"]


def test_a_kernel_that_failed_while_it_was_timed_fails_the_comparison(result):
    spec = result.specs[0]
    case = spec.speed[0]
    arm = case.arms[0].model_copy(update={"failed": "kernel roundtrip_keys failed", "seconds": None})
    broken_case = case.model_copy(update={"arms": [arm, *case.arms[1:]]})
    broken = result.model_copy(update={"specs": [spec.model_copy(update={"speed": [broken_case]})]})
    assert not broken.passed and "kernel roundtrip_keys failed" in broken.problems[0]


def test_what_mlx_refused_is_listed_and_is_no_failure(result):
    spec = result.specs[0]
    refused = spec.parity[4].model_copy(update={"not_run": "RuntimeError: No implementation for problem shape"})
    listed = result.model_copy(update={"specs": [spec.model_copy(update={"parity": [*spec.parity[:4], refused]})]})
    assert listed.passed and any("No implementation for problem shape" in line for line in listed.not_run)


def test_a_comparison_in_which_no_parity_check_ran_has_not_passed(result):
    spec = result.specs[0]
    refused = [check.model_copy(update={"not_run": "refused"}) for check in spec.parity]
    assert not result.model_copy(update={"specs": [spec.model_copy(update={"parity": refused})]}).passed
    assert not result.model_copy(update={"specs": []}).passed


def test_what_was_not_run_says_so_once():
    assert not_run("not run: no CUDA device") == "not run: no CUDA device"
    assert not_run("MLX was built without it") == "not run: MLX was built without it"


def test_agreement_counts_tokens_and_finds_the_first_divergence():
    ours, theirs = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[1, 2, 0, 4], [5, 6, 7, 8]])
    found = agreement("metal", ours, "mlx", theirs)
    assert found.agreement == 7 / 8 and found.first_divergence == (2 + 4) / 2
    assert (found.prompts, found.steps) == (2, 4)


@pytest.mark.parametrize("text", ["full", "mlx-quantized:bits=4"])
def test_caches_that_no_backend_has_a_part_in_are_refused(text):
    with pytest.raises(SpecError, match="backends are compared on"):
        compare_backends([CacheSpec.parse(text)], settings=SETTINGS)
    with pytest.raises(SystemExit) as stopped:
        main([text, "--out", "unused.json"])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--settings", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--settings", "wrong.json"], "settings 'wrong.json': speed.rounds: Input should be greater than or equal to 2"),
        (["--settings", "bytes.json"], "settings 'bytes.json': Invalid JSON"),
        (["--model", "missing"], "model 'missing': neither 'embedded', nor a folder that exists, nor a Hugging Face id"),
        (["--out", "missing/comparison.json"], "out 'missing/comparison.json': its folder is not there"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_text('{"speed": {"rounds": -1}}')
    (tmp_path / "bytes.json").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as stopped:
        main(["--out", "comparison.json", *arguments])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert sentence in said
    assert not (tmp_path / "comparison.json").exists()


def test_settings_that_are_not_given_suit_the_device():
    """One field of speed on a CPU must not bring a GPU's sizes along."""
    speed = ComparisonSettings.model_validate({"speed": {"rounds": 9}}).speed
    assert speed.model_copy(update={"rounds": 5}) == ComparisonSettings().speed


def test_it_runs_where_no_tracker_is(tmp_path):
    """The command writes the result, and neither Prefect nor MLflow nor datasets is imported by it."""
    settings, out = tmp_path / "settings.json", tmp_path / "comparison.json"
    settings.write_text(SETTINGS.model_dump_json())
    script = (
        "import sys; from kivi.measure.backends.__main__ import main\n"
        f"code = main(['kivi:bits=2,residual=32', '--model', 'none', '--settings', {str(settings)!r}, '--out', {str(out)!r}])\n"
        "print(code, sorted({'prefect', 'mlflow', 'datasets', 'tasks', 'flows'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout.strip() == "0 []", done.stderr
    written = ComparisonResult.model_validate_json(out.read_text())
    assert written.passed and written.specs[0].model is None
    for backend in written.backends:
        assert isinstance(backend, BackendState) and (backend.available or f"{backend.name}: not run" in done.stderr)


def test_a_model_is_compared_end_to_end(tiny):
    settings = SETTINGS.model_copy(
        update={
            "speed": SETTINGS.speed.model_copy(
                update={"flush_tokens": (), "contexts": (), "model_context": 80, "model_steps": 6}
            )
        }
    )
    compared = compare_backends(SPECS[:1], settings=settings, model=tiny()).specs[0].model
    assert (compared.model, compared.dtype) == ("llama", "float32")
    for case, operation in ((compared.prefill, "model prefill"), (compared.decode, "model decode")):
        assert case.operation == operation and case.baseline == "full" and case.tokens == 80
        assert [arm.arm for arm in case.arms] == ["full", "mlx"]
        assert all(len(arm.seconds.rounds) == 2 for arm in case.arms)
    (pair,) = compared.agreement
    assert (pair.arm, pair.reference, pair.prompts, pair.steps) == ("mlx", "full", 2, 7)


def test_the_tokens_of_the_timed_arms_are_those_of_the_caches_alone(tiny, monitor):
    """Interleaving mixes nothing up: each arm generates what it generates alone."""
    model, rounds = tiny(), 3
    prompts = [[(7 * index * index + place) % 256 for place in range(70)] for index in range(rounds + 1)]
    settings = SETTINGS.speed.model_copy(update={"rounds": rounds, "model_steps": 8})
    spec = SPECS[0].model_copy(update={"residual_length": 0})
    timed = time_model(model, [resolve("mlx")], spec, prompts, settings, monitor)
    for name, alone in (("full", FULL), ("mlx", spec)):
        for prompt, tokens in zip(prompts, timed.tokens[name], strict=False):
            arm = Arm(model, alone)
            logits = arm.prefill(mx.array([prompt]))
            expected = [mx.argmax(logits).item()]
            for _ in range(8):
                expected.append(mx.argmax(arm.decode(mx.array([[expected[-1]]]))).item())
            assert tokens.tolist() == expected
    assert not np.array_equal(timed.tokens["full"], timed.tokens["mlx"])  # two bits and no window show
