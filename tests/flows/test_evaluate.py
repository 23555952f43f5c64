"""The ad-hoc evaluation, with its parameters as a deployment gets them: plain JSON."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import get_client

from flows.evaluate import evaluate

MEASURE = {
    "score": {"sequences": 1, "length": 128},
    "generation": {"continuations": 1, "context": 64, "steps": 2},
    "throughput": {"rounds": 1, "contexts": [32], "steps": 2},
}


def test_one_cell_is_measured_and_has_a_verdict(prefect_server, tmp_path):
    prompts = {"source": "humaneval", "limit": 4}
    limits = {"*": {"kl_mean": 1.0, "flip_rate": 1.0}}
    state = evaluate("embedded", prompts, "kivi-roundtrip:bits=4,residual=32", MEASURE, limits, tmp_path, return_state=True)
    assert state.is_completed(), state.message
    result = state.result()
    (outcome,) = result.night.outcomes
    assert outcome.result.quality.sequences == 1
    assert outcome.result.throughput.decode_ratio > 0  # against the full cache, although that is no cell here
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(result.night.flow_run_id))
    assert run.name == "kivi-roundtrip-k4v4-g32-r32-auto on embedded"
