"""An audit in a real MLflow store, and as a person reads it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from pydantic import ValidationError

from kivi.cache.single import KIVICache
from kivi.measure.audit import AuditReport, AuditSettings, Check, Curve, Subject, audit, audit_spec
from kivi.spec import CacheSpec
from tasks.report.audit import audit_figures, audit_markdown, quality_figure
from tasks.run.audit import EXPERIMENT, AuditConfig, log_audit
from tasks.tracking.runs import NOTE_LENGTH, search, shortened
from tasks.tracking.store import writer

SPEC = CacheSpec.parse("kivi:bits=2,residual=32,backend=mlx")
SETTINGS = AuditSettings(decode_steps=20, history=256)


class ForgetsWindow(KIVICache):
    def bytes(self):
        return super().bytes().model_copy(update={"residual": 0})


@pytest.fixture(scope="module")
def honest() -> AuditReport:
    return audit_spec(SPEC, SETTINGS, names=["bytes", "append", "quality"])


@pytest.fixture(scope="module")
def lying() -> AuditReport:
    subject = Subject(spec=SPEC, make=lambda: ForgetsWindow(SPEC), heads=2, head_dim=64)
    return audit(subject, SETTINGS, names=["bytes", "definition"])


@pytest.fixture(scope="module")
def tracking_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("audited")


def test_an_audit_is_one_run_logged_once(tracking_dir, honest, lying):
    with writer(tracking_dir, EXPERIMENT) as store:
        logged = log_audit(store, honest, "f-1")
        assert log_audit(store, honest, "f-1") == logged
        (run,) = search(store, {"kivi.kind": "audit"})
        curve = store.client.get_metric_history(run.info.run_id, "audit.live_bytes")
        files = {file.path for file in store.client.list_artifacts(run.info.run_id)}
        failed = store.client.get_run(log_audit(store, lying).run_id)
        assert store.client.get_experiment(store.experiment_id).name == "kivi-audit"
    assert (run.info.run_id, run.info.status) == (logged.run_id, "FINISHED")
    assert run.data.params["cache"] == "KIVICache" and run.data.params["cache.residual_length"] == "32"
    assert run.data.tags["kivi.verdict"] == "pass" and run.data.tags["prefect.flow_run_id"] == "f-1"
    metrics = run.data.metrics
    assert metrics["audit.passed"] == metrics["audit.passed/books"] == 1 and metrics["audit.errors"] == 0
    assert metrics["books.bill_of_residual/billed_bytes"] > 0  # as in audits that stores already have
    assert "audit.passed/quality" not in metrics  # what was not run is no number
    assert [point.step for point in curve] == list(range(20))
    assert files == {"audit.json", "audit.md", "figures"}
    assert (failed.info.status, failed.data.tags["kivi.verdict"]) == ("FAILED", "fail")
    assert failed.data.metrics["audit.passed/books"] == 0 and failed.data.metrics["audit.passed/definition"] == 1


def test_a_run_that_a_killed_process_left_is_brought_to_its_end(tracking_dir, honest):
    """The same result finishes it; another result closes it."""
    with writer(tracking_dir, EXPERIMENT) as store:
        done = log_audit(store, honest).run_id
        for run_id in (done, left := store.client.create_run(store.experiment_id, tags={"kivi.kind": "audit"}).info.run_id):
            store.client.update_run(run_id, status="RUNNING")
        assert log_audit(store, honest).run_id == done
        assert store.client.get_run(done).info.status == "FINISHED"
        assert store.client.get_run(left).info.status == "KILLED"
        curve = store.client.get_metric_history(done, "audit.live_bytes")
    assert len(curve) == 20  # no point twice


def test_a_run_that_was_closed_half_logged_is_completed(tmp_path, honest, lying, monkeypatch):
    """Its process died over a file, and another audit was logged in between."""

    def full_disk(*arguments):
        raise OSError("no space left on device")

    with writer(tmp_path, EXPERIMENT) as store:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(store.client, "log_text", full_disk)
            log_audit(store, honest)
        (half,) = search(store, {"kivi.kind": "audit"})
        log_audit(store, lying)
        closed = store.client.get_run(half.info.run_id)
        assert (closed.info.status, "kivi.closed" in closed.data.tags) == ("KILLED", True)
        assert log_audit(store, honest).run_id == half.info.run_id
        run = store.client.get_run(half.info.run_id)
        files = {file.path for file in store.client.list_artifacts(half.info.run_id)}
        curve = store.client.get_metric_history(half.info.run_id, "audit.live_bytes")
    assert (run.info.status, "kivi.closed" in run.data.tags) == ("FINISHED", False)
    assert files == {"audit.json", "audit.md", "figures"} and "mlflow.note.content" in run.data.tags
    assert len(curve) == 20  # no point twice


def test_the_page_has_the_verdict_the_errors_and_the_commands(honest, lying):
    page = audit_markdown(honest)
    assert page.splitlines()[2] == f"**{honest.headline}**" and "## Errors" not in page
    assert "not run: no model was asked for" in page
    assert "Again: `kivi audit kivi:residual=32,backend=mlx --check bytes`" in page
    wrong = audit_markdown(lying)
    assert wrong.index("## Errors") < wrong.index("## Checks") and "accounts 0 bytes for residual" in wrong


def test_evidence_is_escaped(honest):
    check = honest.checks[0].model_copy(update={"findings": [], "not_run": "a|b\x1b <script>"})
    page = audit_markdown(honest.model_copy(update={"checks": [check]}))
    assert "a\\|b\\\\x1b &lt;script&gt;" in page


def test_the_figures_are_images_of_the_curves(honest):
    drawn = audit_figures(honest)
    assert set(drawn) == {"figures/bytes.svg", "figures/oldest_error.svg"}
    assert "live arrays" in "".join(ET.fromstring(drawn["figures/bytes.svg"]).itertext())  # noqa: S314  our own


def test_quality_is_drawn_for_each_cache_also_when_it_has_no_error():
    curves = [
        Curve(name=f"audit.{name}/{slug}", axis="decode step", unit="1", steps=[0, 1], values=values)
        for slug, values in (("kivi-k2", [0.5, 0.25]), ("full", [0.0, 0.0]))
        for name in ("step_kl", "logit_cosine", "logit_cosine_free")
    ]
    for shown in (curves, curves[3:]):
        texts = "".join(ET.fromstring(quality_figure(shown)).itertext())  # noqa: S314  our own
        assert "full" in texts and "free-running" in texts and "mathdefault" not in texts


def test_a_long_description_is_cut_at_a_line_and_says_so():
    note = "\n".join(f"line {index}" for index in range(5000))
    cut = shortened(note, "Markdown file")
    assert len(cut) <= NOTE_LENGTH and cut.endswith("under Artifacts.")
    assert note.startswith(cut[: cut.rindex("\n\n…")]) and shortened("short", "") == "short"


def test_a_configuration_is_checked_before_anything_runs():
    config = AuditConfig.model_validate({"spec": "kivi:bits=4", "checks": ["trim"]})
    assert config.spec.key_bits == 4 and not config.needs_model
    assert AuditConfig.model_validate({"spec": "kivi"}).needs_model
    assert not AuditConfig.model_validate({"spec": "kivi", "model": None}).needs_model
    with pytest.raises(ValidationError, match="check 'books'"):
        AuditConfig.model_validate({"spec": "kivi", "checks": ["books"]})
    assert Check(name="x", question="?", seconds=0, findings=[]).outcome == "passed"
