"""The ad-hoc evaluation, with its parameters as a deployment gets them: plain JSON."""

from __future__ import annotations

import json
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client

from flows.evaluate import compared, evaluate
from kivi.spec import CacheSpec
from tasks.config import ModelConfig

MEASURE = {
    "score": {"sequences": 1, "length": 128},
    "generation": {"continuations": 1, "context": 64, "steps": 2},
    "throughput": {"rounds": 1, "contexts": [32], "steps": 2},
}


@pytest.mark.parametrize(
    ("specs", "beside"),
    [
        (["kivi:k4v3,g64"], ["mlx-quantized:k4v4"]),
        (["kivi:k3v2,g64", "kivi:k2v2"], ["mlx-quantized:k2v2"]),  # 3 bits a number, as mlx-lm's with scale and bias
        (["kivi:k8v8,r0", "kivi-roundtrip:k4v4"], ["mlx-quantized:k8v8", "mlx-quantized:k4v4"]),
        (["full", "mlx-quantized:k3v3"], []),
    ],
)
def test_full_and_the_nearest_of_mlx_lm_come_along(specs, beside):
    wanted = dict.fromkeys(["full", *beside, *specs])
    caches, left_out = compared([CacheSpec.parse(text) for text in specs], ModelConfig())
    assert ([spec.text for spec in caches], left_out) == (list(wanted), [])


def test_what_mlx_lms_cache_cannot_take_is_left_out_with_a_sentence(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 48}))
    caches, (sentence,) = compared([CacheSpec.parse("kivi:k4v4")], ModelConfig(name=str(tmp_path)))
    assert [spec.text for spec in caches] == ["full", "kivi:k4v4"]
    assert sentence.startswith("mlx-quantized:k4v4 is left out: ") and "48" in sentence


def test_cells_are_measured_and_have_a_verdict(prefect_server, tmp_path):
    prompts = {"source": "humaneval", "limit": 4}
    limits = {"*": {"kl_mean": 1.0, "flip_rate": 1.0}}
    cells = {"spec": "kivi-roundtrip:bits=4,residual=32", "others": ["kivi:k4v4,r32"]}
    state = evaluate("embedded", prompts, measure=MEASURE, thresholds=limits, tracking_dir=tmp_path, return_state=True, **cells)
    assert state.is_completed(), state.message
    result = state.result()
    outcome, other = result.night.outcomes
    assert other.result.memory.bytes_per_token_4096 < outcome.result.memory.bytes_per_token_4096
    assert outcome.result.quality.sequences == 1
    assert outcome.result.throughput.decode_ratio > 0  # against the full cache, although that is no cell here
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(result.night.flow_run_id))
    assert run.name == "kivi-roundtrip-k4v4-g32-r32-auto on embedded"
