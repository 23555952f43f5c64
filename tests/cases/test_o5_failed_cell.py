"""O5: one cell raised and the flow was Completed."""

from __future__ import annotations

from flows.nightly import nightly
from tasks.config import NightlyConfig

# With a residual window longer than what is scored nothing is ever quantised, which is a failed cell.
CONFIG = {
    "name": "o5",
    "models": ["embedded"],
    "prompt_sets": [{"source": "humaneval", "limit": 4}],
    "specs": ["kivi-roundtrip:bits=4,residual=512", "kivi-roundtrip:bits=4,residual=32"],
    "measure": {
        "score": {"sequences": 1, "length": 160},
        "generation": {"continuations": 1, "context": 96, "steps": 2},
        "throughput": {"rounds": 1, "contexts": [32], "steps": 2},
    },
    "thresholds": {"*": {"kl_mean": 1.0, "flip_rate": 1.0}},
}


def test_a_failed_cell_fails_the_flow_by_name_and_the_others_run(prefect_server, tmp_path):
    state = nightly(NightlyConfig.model_validate(CONFIG), tmp_path, return_state=True)
    assert state.is_failed()
    bad = "kivi-roundtrip-k4v4-g32-r512-mlx on embedded × humaneval"
    assert f"{bad} failed: " in state.message
    failed, finished = state.result(raise_on_failure=False).night.outcomes
    assert (failed.cell.label, failed.result) == (bad, None)
    assert finished.result is not None
    assert finished.result.throughput is not None
    assert len(state.result(raise_on_failure=False).verdict.reasons) == 1
