"""The audit as a flow: run, logged, shown, and in a true state."""

from __future__ import annotations

from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from flows.audit import audit
from flows.results import Checked, final_state
from kivi.measure.audit import AuditSettings, Notes
from tasks.run.audit import EXPERIMENT, AuditConfig
from tasks.tracking.store import writer

CONFIG = AuditConfig(
    spec="kivi:bits=2,residual=32,backend=mlx",
    checks=("bytes", "definition", "parity"),
    model=None,
    settings=AuditSettings(decode_steps=10, history=128),
)


@pytest.fixture(scope="module")
def audited(prefect_server, tmp_path_factory):
    tracking_dir = tmp_path_factory.mktemp("audit")
    return tracking_dir, audit(CONFIG, tracking_dir, return_state=True)


def test_an_honest_cache_is_completed_logged_and_shown(audited):
    tracking_dir, state = audited
    assert state.is_completed() and state.message.startswith("passed: 3 checks"), state.message
    result = state.result()
    with writer(tracking_dir, EXPERIMENT) as store:
        run = store.client.get_run(result.logged.run_id)
    assert run.data.metrics["audit.passed"] == 1
    flow_run_id = UUID(run.data.tags["prefect.flow_run_id"])
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        )
    assert {artifact.key for artifact in artifacts} >= {"audit", "audit-findings"}


def test_an_error_is_failed_and_says_what_was_seen(audited):
    result = audited[1].result()
    notes = Notes("kivi audit kivi --check bytes")
    notes.check("total", "live arrays hold 10 bytes more", "")
    check = result.result.checks[0].model_copy(update={"findings": notes.findings})
    report = result.result.model_copy(update={"checks": [check], "passed": False})
    state = final_state(Checked(result=report, logged=result.logged))
    assert state.is_failed() and "bytes, total: live arrays hold 10 bytes more" in state.message


def test_a_cache_without_byte_accounting_and_a_missing_backend_end_it_before_anything_runs(audited):
    for spec, words in (("full", "has byte accounting"), ("kivi:backend=cuda", "backend=cuda")):
        config = AuditConfig(spec=spec, model=None)
        state = audit(config, audited[0], return_state=True)
        if spec == "full" or not state.is_completed():  # on a machine with CUDA the second one runs
            assert state.is_failed() and words in state.message
