"""The audit passes honest caches, and its report is typed, consistent and can be shown again."""

from __future__ import annotations

import json
import shlex

import pytest
from pydantic import ValidationError

from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.measure.audit import (
    CHECKS,
    AuditReport,
    AuditSettings,
    Check,
    Curve,
    DecodeSettings,
    Reading,
    audit,
    audit_spec,
    subject_of,
)
from kivi.measure.audit.subject import differing, read
from kivi.measure.monitor import DeadlineError, Monitor
from kivi.spec import CacheSpec, SpecError

SETTINGS = AuditSettings(decode_steps=40, history=256)
HONEST = (
    "kivi:bits=2,residual=32,backend=mlx",
    "kivi:key_bits=4,value_bits=3,group=64,residual=0,sinks=64,rotate=both,backend=mlx,params=float32",
    "kivi:bits=8,group=128,residual=5,backend=mlx",
    "kivi-roundtrip:bits=2,residual=32,backend=mlx",
    "kivi-roundtrip:bits=3,residual=32,rotate=both,backend=mlx",
)


@pytest.mark.parametrize("text", HONEST)
def test_an_honest_cache_passes_every_check(text):
    report = audit_spec(CacheSpec.parse(text), SETTINGS)
    assert report.findings("error") == []
    assert report.passed and report.headline.startswith("passed: 14 checks")
    assert [check.name for check in report.checks if check.outcome == "not run"] == ["quality"]
    saves_nothing = [check for check, _ in report.findings("warning")]
    assert saves_nothing == (["growth"] if "roundtrip" in text else [])


def test_a_head_dimension_that_no_group_divides_is_accounted_as_stored():
    settings = SETTINGS.model_copy(update={"head_dim": 72})
    report = audit_spec(CacheSpec.parse("kivi:bits=2,residual=16,backend=mlx"), settings)
    assert report.findings("error") == []


def test_a_round_trip_estimates_what_the_packed_cache_holds():
    """200 tokens, heads x head_dim 256, b=2, G=R=32, float16: keys are 131,072 bytes in 256 slots, and 15,360 packed."""
    roundtrip, packed = (
        subject_of(CacheSpec.parse(f"{kind}:bits=2,residual=32,backend=mlx"), heads=4, head_dim=64)
        for kind in ("kivi-roundtrip", "kivi")
    )
    tokens = roundtrip.tokens(200, seed=3)
    calls = [100] + [1] * 100
    full, codes = roundtrip.fed(tokens, calls), packed.fed(tokens, calls)
    estimate, held = full.packed_bytes(), codes.bytes()
    assert full.keys.nbytes == 131_072
    assert estimate.key_codes + estimate.key_params == held.key_codes + held.key_params == 15_360
    assert held.resident < full.keys.nbytes  # keys and values, in less than keys alone
    assert differing(read(full), read(codes)) == 0


def test_a_wrong_estimate_of_the_packed_size_is_an_error(monkeypatch):
    def halved(cache):
        said = estimate(cache)
        return said.model_copy(update={"value_codes": said.value_codes // 2})

    estimate = RoundTripKIVICache.packed_bytes
    monkeypatch.setattr(RoundTripKIVICache, "packed_bytes", halved)
    report = audit_spec(CacheSpec.parse(HONEST[3]), SETTINGS, names=["bytes"])
    ((check, found),) = report.findings("error")
    assert (check, found.name) == ("bytes", "estimate of packed size")
    assert "for packed value_codes, expected" in found.evidence


def test_bytes_are_compared_at_each_decode_step():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS.model_copy(update={"decode_steps": 200}), names=["bytes"])
    curves = {curve.name: curve for curve in report.checks[0].curves}
    live, accounted = curves["audit.live_bytes"], curves["audit.accounted_bytes"]
    assert live.steps == list(range(200)) and len(accounted.values) == 200
    assert all(held >= counted > 0 for held, counted in zip(live.values, accounted.values, strict=True))


def test_a_report_is_read_again_as_it_was_written():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["definition", "append"])
    assert AuditReport.model_validate_json(report.model_dump_json()) == report
    assert report.schema_version == 1 and report.packages["mlx"] and report.device


def test_a_report_of_version_0_1_0_is_read():
    """It has checks as `scenes`, under names of its own, and a check that is there no more."""
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["bytes", "memory", "append"])
    old = report.model_dump(mode="json")
    old["scenes"] = [
        {**check, "name": name} for check, name in zip(old.pop("checks"), ("books", "witness", "seed"), strict=True)
    ]
    read_again = AuditReport.model_validate_json(json.dumps(old))
    assert [check.name for check in read_again.checks] == ["bytes", "memory", "seed"]
    assert read_again.checks[:2] == report.checks[:2]


def test_a_report_that_contradicts_its_findings_is_refused():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["definition"])
    with pytest.raises(ValidationError, match="contradicts the findings"):
        AuditReport.model_validate({**report.model_dump(), "passed": False})
    with pytest.raises(ValidationError, match="2 steps and 1 values"):
        Curve(name="x", axis="step", unit="1", steps=[0, 1], values=[0.0])


def test_an_audit_of_which_nothing_ran_has_not_passed():
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["quality"])
    assert not report.passed and report.headline == "failed: no check was run"
    assert report.checks[0] == Check(
        name="quality", question=report.checks[0].question, seconds=0, findings=[], not_run="not run: no model was asked for"
    )


@pytest.mark.parametrize("text", [*HONEST, "kivi"])
def test_each_finding_names_the_command_that_shows_it_again(text):
    spec = CacheSpec.parse(text)
    if spec.backend == "auto":
        spec = CacheSpec.checked({**spec.model_dump(), "residual_length": 16})
    report = audit_spec(spec, SETTINGS, names=["definition"])
    kivi, command, again, option, check = shlex.split(report.checks[0].findings[0].command)
    assert (kivi, command, option) == ("kivi", "audit", "--check")
    assert CacheSpec.parse(again) == spec and check in CHECKS


def test_unknown_checks_and_caches_without_byte_accounting_are_refused():
    with pytest.raises(ValueError, match=r"check 'books': expected one of bytes, memory"):
        audit_spec(CacheSpec.parse(HONEST[0]), names=["books"])
    for text in ("full", "mlx-quantized:bits=4"):
        with pytest.raises(SpecError, match="has byte accounting"):
            audit_spec(CacheSpec.parse(text))


def test_a_deadline_ends_the_audit():
    with pytest.raises(DeadlineError):
        audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, monitor=Monitor(deadline_s=-1))


def test_checks_are_told_of_in_order():
    seen = []
    subject = subject_of(CacheSpec.parse(HONEST[0]), heads=1, head_dim=32)
    audit(subject, SETTINGS, names=["trim", "definition"], monitor=Monitor(lambda *step: seen.append(step)))
    assert seen == [("audit: definition", 0, 2), ("audit: trim", 1, 2)]


def test_quality_is_followed_along_a_decode_at_every_number_of_bits(tiny, texts, references):
    reading = Reading(tiny(), texts, references, DecodeSettings(prompts=2, context=64, steps=12))
    spec = CacheSpec.parse("kivi:bits=2,residual=0,backend=mlx")
    report = audit_spec(spec, SETTINGS, names=["quality"], reading=reading)
    (check,) = report.checks
    assert report.passed and report.model == "llama, float32"
    found = {finding.evidence.split(":")[0]: finding.numbers for finding in check.findings if finding.name == "quality"}
    kl = [found[f"kivi-k{bits}v{bits}-g32-r0-mlx"]["kl_mean"] for bits in (2, 3, 4, 8)]
    assert kl[0] > kl[1] > kl[2] > kl[3] > 0
    curves = {curve.name: curve.values for curve in check.curves}
    assert len(curves) == 12 and all(len(values) == 12 for values in curves.values())
    forced, free = (curves[f"audit.{name}/{spec.slug}"] for name in ("logit_cosine", "logit_cosine_free"))
    assert forced[0] == free[0] and forced != free  # one run until a token differs, then two


def test_a_decode_that_sees_no_quantised_key_tests_nothing_and_says_so(tiny, texts, references):
    reading = Reading(tiny(), texts, references, DecodeSettings(prompts=1, context=32, steps=4))
    report = audit_spec(CacheSpec.parse("kivi:bits=2,residual=128,backend=mlx"), SETTINGS, names=["quality"], reading=reading)
    assert [found.name for _, found in report.findings("warning")] == ["nothing tested"]


def test_texts_that_are_too_short_are_an_error_of_the_check(tiny, references):
    reading = Reading(tiny(), ["short"], references, DecodeSettings(prompts=1, context=64, steps=4))
    report = audit_spec(CacheSpec.parse(HONEST[0]), SETTINGS, names=["quality"], reading=reading)
    assert not report.passed and "give more or longer texts" in report.findings("error")[0][1].evidence
