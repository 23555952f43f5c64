"""The audit passes honest caches, and its report is typed, consistent and can be shown again."""

from __future__ import annotations

import shlex

import pytest
from pydantic import ValidationError

from kivi.measure.audit.checks import SCENES, AuditReport, SceneSettings, audit, audit_spec, subject_of
from kivi.measure.audit.decode_length import DecodeSettings, Reading
from kivi.measure.audit.report import Curve, Scene
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.spec import CacheSpec, SpecError

SETTINGS = SceneSettings(decode_steps=40, history=256)
HONEST = (
    "kivi:bits=2,residual=32,backend=mlx",
    "kivi:key_bits=4,value_bits=3,group=64,residual=0,sinks=64,rotate=both,backend=mlx,params=float32",
    "kivi:bits=8,group=128,residual=5,backend=mlx",
    "kivi-roundtrip:bits=2,residual=32,backend=mlx",
    "kivi-roundtrip:bits=3,residual=32,rotate=both,backend=mlx",
)


@pytest.mark.parametrize("text", HONEST)
def test_an_honest_cache_passes_every_scene(text):
    report = audit_spec(CacheSpec.parse(text), SETTINGS)
    assert report.findings("error") == []
    assert report.passed and report.headline.startswith("passed: 11 scenes")
    assert [scene.name for scene in report.scenes if scene.outcome == "not run"] == ["quality"]
    saves_nothing = [scene for scene, _ in report.findings("warning")]
    assert saves_nothing == (["growth"] if "roundtrip" in text else [])


def test_a_head_dimension_that_no_group_divides_is_billed_as_stored():
    settings = SETTINGS.model_copy(update={"head_dim": 72})
    report = audit_spec(CacheSpec.parse("kivi:bits=2,residual=16,backend=mlx"), settings)
    assert report.findings("error") == []


def test_the_audit_that_the_project_began_with_is_reproduced():
    """200 tokens, heads x head_dim 256, b=2, G=R=32: 131,072 bytes live in 256 slots, 15,360 billed, 81,920 / 15,360 = 5.33."""
    report = audit_spec(CacheSpec.parse(HONEST[3]), SETTINGS, names=["seed"])
    (scene,) = report.scenes
    roundtrip, packed, same = scene.findings
    assert roundtrip.numbers["live_key_bytes"] == 131_072 and roundtrip.numbers["slots"] == 256
    assert roundtrip.numbers["estimated_key_bytes"] == packed.numbers["packed_key_bytes"] == 15_360
    assert roundtrip.numbers["ratio_of_estimate"] == pytest.approx(5.333, abs=1e-3)
    assert "81,920 / 15,360 = 5.33" in roundtrip.evidence
    assert packed.numbers["live_bytes"] < roundtrip.numbers["live_key_bytes"]  # keys and values, in less than keys alone
    assert same.severity == "info"


def test_the_books_are_looked_at_at_each_decode_step():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS.model_copy(update={"decode_steps": 200}), names=["books"])
    curves = {curve.name: curve for curve in report.scenes[0].curves}
    live, accounted = curves["audit.live_bytes"], curves["audit.accounted_bytes"]
    assert live.steps == list(range(200)) and len(accounted.values) == 200
    assert all(held >= billed > 0 for held, billed in zip(live.values, accounted.values, strict=True))


def test_a_report_is_read_again_as_it_was_written():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["definition", "append"])
    assert AuditReport.model_validate_json(report.model_dump_json()) == report
    assert report.schema_version == 1 and report.packages["mlx"] and report.device


def test_a_report_that_contradicts_its_findings_is_refused():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["definition"])
    with pytest.raises(ValidationError, match="contradicts the findings"):
        AuditReport.model_validate({**report.model_dump(), "passed": False})
    with pytest.raises(ValidationError, match="2 steps and 1 values"):
        Curve(name="x", axis="step", unit="1", steps=[0, 1], values=[0.0])


def test_an_audit_of_which_nothing_ran_has_not_passed():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["quality"])
    assert not report.passed and report.headline == "failed: no scene was run"
    assert report.scenes[0] == Scene(
        name="quality", question=report.scenes[0].question, seconds=0, findings=[], not_run="not run: no model was asked for"
    )


@pytest.mark.parametrize("text", [*HONEST, "kivi"])
def test_each_finding_names_the_command_that_shows_it_again(text):
    spec = CacheSpec.parse(text)
    if spec.backend == "auto":
        spec = CacheSpec.checked({**spec.model_dump(), "residual_length": 16})
    report = audit_spec(spec, SETTINGS, names=["definition"])
    kivi, command, again, option, scene = shlex.split(report.scenes[0].findings[0].command)
    assert (kivi, command, option) == ("kivi", "audit", "--scene")
    assert CacheSpec.parse(again) == spec and scene in SCENES


def test_unknown_scenes_and_caches_without_books_are_refused():
    with pytest.raises(ValueError, match=r"scene 'bytes': expected one of books, witness"):
        audit_spec(CacheSpec.parse(HONEST[0]), names=["bytes"])
    for text in ("full", "mlx-quantized:bits=4"):
        with pytest.raises(SpecError, match="keeps books"):
            audit_spec(CacheSpec.parse(text))


def test_a_deadline_ends_the_audit():
    with pytest.raises(DeadlineError):
        audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, monitor=Monitor(deadline_s=-1))


def test_scenes_are_told_of_in_order():
    seen = []
    subject = subject_of(CacheSpec.parse(HONEST[0]), heads=1, head_dim=32)
    audit(subject, SETTINGS, names=["trim", "definition"], monitor=Monitor(lambda *step: seen.append(step)))
    assert seen == [("audit: definition", 0, 2), ("audit: trim", 1, 2)]


def test_quality_is_followed_along_a_decode_at_every_number_of_bits(tiny, texts, references):
    reading = Reading(tiny(), texts, references, DecodeSettings(prompts=2, context=64, steps=12))
    spec = CacheSpec.parse("kivi:bits=2,residual=0,backend=mlx")
    report = audit_spec(spec, SETTINGS, names=["quality"], reading=reading)
    (scene,) = report.scenes
    assert report.passed and report.model == "llama, float32"
    found = {finding.evidence.split(":")[0]: finding.numbers for finding in scene.findings if finding.name == "quality"}
    kl = [found[f"kivi-k{bits}v{bits}-g32-r0-mlx"]["kl_mean"] for bits in (2, 3, 4, 8)]
    assert kl[0] > kl[1] > kl[2] > kl[3] > 0
    curves = {curve.name: curve.values for curve in scene.curves}
    assert len(curves) == 12 and all(len(values) == 12 for values in curves.values())
    forced, free = (curves[f"audit.{name}/{spec.slug}"] for name in ("logit_cosine", "logit_cosine_free"))
    assert forced[0] == free[0] and forced != free  # one run until a token differs, then two


def test_a_decode_that_sees_no_quantised_key_tests_nothing_and_says_so(tiny, texts, references):
    reading = Reading(tiny(), texts, references, DecodeSettings(prompts=1, context=32, steps=4))
    report = audit_spec(CacheSpec.parse("kivi:bits=2,residual=128,backend=mlx"), SETTINGS, names=["quality"], reading=reading)
    assert [found.name for _, found in report.findings("warning")] == ["nothing tested"]


def test_texts_that_are_too_short_are_an_error_of_the_scene(tiny, references):
    reading = Reading(tiny(), ["short"], references, DecodeSettings(prompts=1, context=64, steps=4))
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["quality"], reading=reading)
    assert not report.passed and "give more or longer texts" in report.findings("error")[0][1].evidence
