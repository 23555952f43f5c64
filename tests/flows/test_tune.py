"""The tuning as a flow: measured, logged, shown, found again, gone on with after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from uuid import UUID

import pytest
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from flows.tune import tune
from kivi.build import make_prompt_cache
from kivi.models import load_model
from kivi.spec import CacheSpec
from tasks.run.cells import loaded_model
from tasks.tracking.runs import search
from tasks.tracking.store import writer
from tasks.tune.config import TuneConfig
from tasks.tune.outcome import EXPERIMENT
from tasks.tune.subject import read_subject


@pytest.fixture(scope="module")
def config(tiny_models):
    return TuneConfig(model=tiny_models(1), effort="low")


@pytest.fixture(scope="module")
def tuned(prefect_server, tmp_path_factory, config):
    tracking_dir = tmp_path_factory.mktemp("tuned")
    return tracking_dir, tune(config, tracking_dir, return_state=True)


def test_a_tuning_ends_in_a_recommendation_with_its_numbers(tuned):
    state = tuned[1]
    assert state.is_completed(), state.message
    result = state.result().result
    assert state.message == result.headline and "bytes a token at 4,096 tokens" in result.headline
    assert [one.aim for one in result.recommendations] == ["good", "marginal"]
    assert {one.family for one in result.candidates} == {"uniform", "by layer", "mlx-lm"} and not result.failed
    assert all(ratio > 0 for ratio in result.decode_ratio.values())
    assert len({one.quality.positions for one in result.candidates}) == 1  # all on the same ones


def test_the_recommended_file_is_a_spec_that_the_model_takes(tuned, config):
    checked = tuned[1].result()
    spec = CacheSpec.load(checked.folder / "recommended.yaml")
    assert spec.slug == checked.result.recommendations[0].slug
    assert CacheSpec.parse(f"kivi@{checked.folder / 'recommended.yaml'}") == spec
    assert len(make_prompt_cache(load_model(config.model.name).model, spec)) == 2
    assert {path.name for path in checked.folder.iterdir()} == {
        "recommended.yaml",
        "recommended-good.yaml",
        "recommended-marginal.yaml",
        "tuning.json",
        "tuning.md",
        "figures",
    }


def test_a_parent_run_has_a_child_a_candidate_with_its_figures(tuned):
    tracking_dir, state = tuned
    checked = state.result()
    with writer(tracking_dir, EXPERIMENT) as store:
        (parent,) = search(store, {"kivi.kind": "tune"})
        children = search(store, {"kivi.kind": "candidate", MLFLOW_PARENT_RUN_ID: parent.info.run_id})
        files = {file.path for file in store.client.list_artifacts(parent.info.run_id)}
        curve = store.client.get_metric_history(parent.info.run_id, "sensitivity.keys_2")
    assert parent.info.run_id == checked.logged.run_id and parent.info.status == "FINISHED"
    assert len(children) == len(checked.result.candidates) == len(checked.logged.child_ids)
    assert {"quality.kl_mean", "memory.bytes_per_token", "accounting.average_bits"} <= set(children[0].data.metrics)
    assert files >= {"recommended.yaml", "tuning.json", "tuning.md", "figures"}
    assert {point.step for point in curve} == {0, 1}
    flow_run_id = UUID(parent.data.tags["prefect.flow_run_id"])
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        )
    assert {artifact.key for artifact in artifacts} >= {"tuning", "tuning-candidates"}


def test_a_second_run_finds_everything(tuned, config):
    tracking_dir, state = tuned
    kept = times(tracking_dir)
    again = tune(config, tracking_dir, return_state=True).result()
    assert times(tracking_dir) == kept
    assert again.logged == state.result().logged
    assert again.result.recommendations == state.result().result.recommendations


def test_a_tuning_that_is_killed_goes_on_where_it_was(prefect_server, kivi_command, tmp_path, config, tuned):
    arguments = ("tune", config.model.name, "--effort", "low", "--tracking-dir", str(tmp_path))
    with subprocess.Popen([*kivi_command, *arguments], stderr=subprocess.DEVNULL, start_new_session=True) as running:
        while len(times(tmp_path)) < 4:
            assert running.poll() is None
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGKILL)
    kept = times(tmp_path)
    assert len(kept) < len(times(tuned[0]))
    state = tune(config, tmp_path, return_state=True)
    assert state.is_completed()
    after = times(tmp_path)
    assert {path: after[path] for path in kept} == kept and set(after) == set(times(tuned[0]))


def test_calibration_rows_are_never_judged(tiny_models, tmp_path):
    rows = tmp_path / "rows.jsonl"
    texts = [chr(65 + row) * 90 for row in range(26)]
    rows.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prompts = {"source": str(rows), "column": "text"}
    model = tiny_models(1)
    for seed in (0, 1):
        subject = read_subject(TuneConfig(model=model, prompts=prompts, effort="low", seed=seed))
        tokenizer = loaded_model(model).tokenizer
        calibrated = set(tokenizer.decode(subject.calibration)) - {"\n"}
        judged = {letter for row in subject.judged for letter in tokenizer.decode(row)} - {"\n"}
        assert len(calibrated) == 4 and judged and not calibrated & judged


def times(tracking_dir: Path) -> dict[str, int]:
    """Return when each finished result was written, by its key."""
    return {path.stem: path.stat().st_mtime_ns for path in (tracking_dir / "results").glob("*.json")}
