"""A night in a real MLflow store: each cell one run, each curve once, whatever happened before."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tasks.config import NightlyConfig
from tasks.judge.gate import judge
from tasks.report.provenance import origin_tags
from tasks.tracking.nights import cell_params, find_cells, find_nights, finish_night, log_night, roll_ups
from tasks.tracking.store import TrackingError, writer

CONFIG = NightlyConfig(specs=("full",))


def log(store, night, **options):
    parent = log_night(store, night, **options)
    finish_night(store, parent, night, judge(night, CONFIG), "# note", {"report.html": "<p>report</p>"})
    return parent


def curve(store, run_id, name):
    return [(point.step, point.value) for point in store.client.get_metric_history(run_id, name)]


def test_one_parent_and_one_child_a_cell(store, make_result, make_night):
    results = [make_result("full"), make_result()]
    parent = log(store, make_night(*results, flow_run_id="f-1"))
    run = store.client.get_run(parent)
    assert run.info.run_name == "nightly 2026-11-29"
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert (tags["kivi.kind"], tags["kivi.verdict"], tags["prefect.flow_run_id"]) == ("matrix", "pass", "f-1")
    assert (tags["mlflow.note.content"], tags["kivi.git_sha"]) == ("# note", "0123abc")
    children = find_cells(store, parent)
    assert {child.data.tags["kivi.cell_key"] for child in children} == {result.cell_key for result in results}
    assert {child.info.status for child in children} == {"FINISHED"}
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent}
    assert len(store.client.search_runs([store.experiment_id])) == 3


def test_a_child_holds_the_params_metrics_and_tags_of_the_design(store, make_result, make_night):
    parent = log(store, make_night(make_result()))
    (child,) = find_cells(store, parent)
    params, metrics, tags = child.data.params, child.data.metrics, child.data.tags
    assert params == {
        "model": "embedded",
        "model_revision": "v1",
        "prompt_set": "humaneval",
        "spec": "kivi-roundtrip-k4v4-g32-r128-mlx",
        "cache.kind": "kivi-roundtrip",
        "cache.key_bits": "4",
        "cache.value_bits": "4",
        "cache.rotate": "none",
        "cache.group_size": "32",
        "cache.residual_length": "128",
        "cache.sink_length": "0",
        "cache.param_dtype": "float16",
        "layers_quantized": "30",
        "layers_kept": "none",
        "backend": "mlx",
        "dtype": "float32",
        "device": "x86-64 processor, 2 cores",
    }
    assert metrics["quality.kl_mean"] == 0.0027
    assert metrics["memory.resident_bytes"] == 300_000
    assert metrics["audit.passed"] == 1.0
    assert {name.split(".")[0] for name in metrics} == {"quality", "generation", "throughput", "memory", "accounting", "audit"}
    assert (tags["kivi.kind"], tags["kivi.verdict"], tags["kivi.git_sha"]) == ("cell", "pass", "0123abc")
    assert tags["kivi.prompt_sha256"] == "ab" * 32
    assert child.info.start_time == 1_795_917_600_000  # the result's own start, 2026-11-29 02:00 UTC
    assert child.info.end_time - child.info.start_time == 20_500  # and what its parts took


@pytest.mark.parametrize("reply", ["repeated", "lost"])
def test_a_lost_reply_to_a_creation_leaves_one_parent_and_one_run_a_cell(store, make_result, make_night, monkeypatch, reply):
    create = store.client.create_run

    def with_a_lost_reply(*arguments, **options):
        first = create(*arguments, **options)
        if reply == "lost":
            raise MlflowException("API request failed: Read timed out")
        time.sleep(0.002)
        return create(*arguments, **options) if first else None  # as MLflow's client repeats a request

    monkeypatch.setattr(store.client, "create_run", with_a_lost_reply)
    parent = log(store, make_night(make_result("full"), make_result()))
    (night,) = find_nights(store)
    cells = find_cells(store, parent)
    assert night.info.run_id == parent and night.data.tags["kivi.verdict"] == "pass"
    assert [cell.data.tags["kivi.verdict"] for cell in cells] == ["pass", "pass"]
    assert {cell.info.status for cell in cells} == {"FINISHED"}
    assert not store.client.search_runs([store.experiment_id], "attributes.status = 'RUNNING'")


def test_a_result_of_code_that_was_changed_says_so(make_result):
    made = make_result().provenance
    ran_with = {"kivi.blas": "OpenBLAS", "kivi.package.mlx": "0.32.4", "kivi.package.mlx-lm": "0.32.2"}
    assert origin_tags(made) == {"kivi.git_sha": "0123abc", **ran_with}
    assert origin_tags(made.model_copy(update={"git_dirty": True})) == {"kivi.git_sha": "0123abc-dirty", **ran_with}


def test_the_params_say_which_layers_keep_their_own_cache(make_result):
    result = make_result()
    kept = {"layers_quantized": 2, "layers_kept": {"0": "RotatingKVCache", "2": "RotatingKVCache", "3": "ArraysCache"}}
    params = cell_params(result.model_copy(update={"provenance": result.provenance.model_copy(update=kept)}))
    assert (params["layers_quantized"], params["layers_kept"]) == ("2", "RotatingKVCache: 0, 2; ArraysCache: 3")


def test_every_cell_has_the_same_params(store, make_result, make_night):
    specs = ("full", "kivi-roundtrip:bits=2,backend=mlx", "mlx-quantized:bits=4")
    parent = log(store, make_night(*(make_result(spec) for spec in specs)))
    names = [set(child.data.params) for child in find_cells(store, parent)]
    assert names[0] == names[1] == names[2]


def test_curves_are_by_step_and_by_position(store, make_result, make_night):
    result = make_result()
    (child,) = find_cells(store, log(store, make_night(result)))
    assert curve(store, child.info.run_id, "quality.logit_cosine") == list(enumerate(result.generation.logit_cosine))
    assert [step for step, _ in curve(store, child.info.run_id, "quality.kl_by_depth")] == [0, 256, 512, 768]


def test_artefacts_are_whole(store, make_result, make_night):
    result = make_result()
    parent = log(store, make_night(result))
    (child,) = find_cells(store, parent)

    def text(run_id, path):
        return Path(store.client.download_artifacts(run_id, path)).read_text()

    assert type(result).model_validate_json(text(child.info.run_id, "result.json")) == result
    assert json.loads(text(child.info.run_id, "audit.json"))["passed"] is True
    assert text(child.info.run_id, "figures/by_step.svg").startswith("<svg")
    assert text(parent, "report.html") == "<p>report</p>"
    table = json.loads(text(child.info.run_id, "generations.json"))  # MLflow's table format, named in its tag
    assert (table["columns"][2], table["data"][0][2]) == ("text", "def f(x):\n    return x")
    assert json.loads(child.data.tags["mlflow.loggedArtifacts"]) == [{"path": "generations.json", "type": "table"}]


def test_the_prompt_set_is_a_dataset_input(store, make_result, make_night):
    parent = log(store, make_night(make_result()))
    (child,) = find_cells(store, parent)
    for run_id in (parent, child.info.run_id):
        (entry,) = store.client.get_run(run_id).inputs.dataset_inputs
        assert (entry.dataset.name, entry.dataset.digest) == ("humaneval", ("ab" * 32)[:36])
        assert {tag.key: tag.value for tag in entry.tags}["kivi.prompt_sha256"] == "ab" * 32


def test_logging_again_changes_nothing(store, make_result, make_night):
    night = make_night(make_result("full"), make_result())
    parent = log(store, night)
    before = {run.info.run_id: run.data.to_dictionary() for run in store.client.search_runs([store.experiment_id])}
    assert log(store, night) == parent
    after = {run.info.run_id: run.data.to_dictionary() for run in store.client.search_runs([store.experiment_id])}
    assert after == before
    for run_id in after:
        for name in after[run_id]["metrics"]:
            points = curve(store, run_id, name)
            assert len(points) == len({step for step, _ in points}), name


def test_a_night_takes_as_long_as_it_was_measured_however_often_it_is_logged(store, make_result, make_night):
    night = make_night(make_result()).model_copy(update={"seconds": {"prepare": 100.0, "cells": 500.0}})
    parent = log(store, night)
    first = store.client.get_run(parent).info
    assert 600_000 <= first.end_time - first.start_time < 700_000
    again = night.model_copy(
        update={"outcomes": tuple(outcome.model_copy(update={"reused": True}) for outcome in night.outcomes), "seconds": {}}
    )
    assert log(store, again) == parent
    assert store.client.get_run(parent).info.end_time == first.end_time


def test_refresh_makes_new_runs_and_tags_the_old(store, make_result, make_night):
    night = make_night(make_result())
    old = log(store, night)
    (old_child,) = find_cells(store, old)
    new = log(store, night, refresh=True)
    assert new != old
    for run_id in (old, old_child.info.run_id):
        run = store.client.get_run(run_id)
        assert run.data.tags["kivi.superseded"] == new
        assert run.info.run_name.endswith("(superseded)")
    assert len(find_cells(store, new)) == 1
    assert log(store, night) == new  # from now on the new one is the night


def test_a_result_measured_anew_supersedes_the_old_run(store, make_result, make_night):
    parent = log(store, make_night(make_result(kl_mean=0.002)))
    (old,) = find_cells(store, parent)
    assert log(store, make_night(make_result(kl_mean=0.003))) == parent
    (new,) = find_cells(store, parent)
    assert new.info.run_id != old.info.run_id
    assert new.data.metrics["quality.kl_mean"] == 0.003
    assert store.client.get_run(old.info.run_id).data.tags["kivi.superseded"] == new.info.run_id


def test_a_failed_cell_is_a_failed_run_with_its_error(store, make_night):
    parent = log(store, make_night("the kernel did not compile"))
    (child,) = find_cells(store, parent)
    assert child.info.status == "FAILED"
    assert child.data.tags["kivi.error"] == "the kernel did not compile"
    assert child.data.tags["kivi.verdict"] == "fail"
    assert store.client.get_run(parent).info.status == "FAILED"
    assert [file.path for file in store.client.list_artifacts(child.info.run_id)] == ["error.txt"]


def test_a_cell_that_failed_and_then_ran_is_one_run(store, make_result, make_night):
    night = make_night("no memory")
    parent = log(store, night)
    (failed,) = find_cells(store, parent)
    night = make_night(make_result(key=night.outcomes[0].cell.key))
    assert log(store, night) == parent
    (child,) = find_cells(store, parent)
    assert (child.info.run_id, child.info.status) == (failed.info.run_id, "FINISHED")
    assert "kivi.error" not in child.data.tags
    run = store.client.get_run(parent)
    assert (run.info.status, run.data.metrics["cells.failed"], run.data.metrics["verdict.passed"]) == ("FINISHED", 0.0, 1.0)


def test_a_cell_that_could_not_be_timed_keeps_its_figures_and_its_error(store, make_result, make_night):
    night = make_night(make_result(throughput=False))
    (outcome,) = night.outcomes
    parent = log(store, night.model_copy(update={"outcomes": (outcome.model_copy(update={"error": "not timed"}),)}))
    (child,) = find_cells(store, parent)
    assert child.data.metrics["quality.kl_mean"] == 0.0027
    assert (child.data.tags["kivi.error"], child.data.tags["kivi.verdict"]) == ("not timed", "fail")


def test_runs_left_running_by_a_dead_process_are_closed_with_a_reason(store, make_result, make_night):
    dead = log_night(store, make_night(make_result(), scheduled="2026-11-28"))  # never finished
    log(store, make_night(make_result(), scheduled="2026-11-29"))
    run = store.client.get_run(dead)
    assert run.info.status == "KILLED"
    assert "ended before it was done" in run.data.tags["kivi.closed"]


def test_the_parent_carries_the_worst_of_each_cache(make_result, make_night):
    night = make_night(make_result(kl_mean=0.002), make_result(kl_mean=0.004, prompt_set="retrieval"), "no memory")
    values = dict(roll_ups(night, judge(night, CONFIG)))
    assert values["quality.kl_mean/kivi-roundtrip-k4v4-g32-r128-mlx"] == 0.004
    assert (values["cells.total"], values["cells.failed"], values["cells.passed"], values["verdict.passed"]) == (3, 1, 2, 0)


def test_answers_are_metrics_of_the_cells_that_have_them_and_roll_up(store, make_result, make_night):
    night = make_night(make_result("full"), make_result(accuracy=0.5), make_result(accuracy=0.25, prompt_set="retrieval"))
    logged = {run.data.tags["kivi.cell_key"]: run.data.metrics for run in find_cells(store, log(store, night))}
    silent, *asked = [logged[result.cell_key] for result in night.results]
    assert not [name for name in silent if name.startswith("answers.")]
    assert [(metrics["answers.accuracy"], metrics["answers.accuracy_full"]) for metrics in asked] == [(0.5, 0.75), (0.25, 0.75)]
    assert dict(roll_ups(night, judge(night, CONFIG)))["answers.accuracy/kivi-roundtrip-k4v4-g32-r128-mlx"] == 0.25


def test_a_long_description_is_cut_at_a_line_and_says_where_the_rest_is(store, make_result, make_night):
    night = make_night(make_result())
    parent = log_night(store, night)
    note = "\n".join(f"| cell {n} | passes |" for n in range(1000))
    finish_night(store, parent, night, judge(night, CONFIG), note, {"report.html": ""})
    lines = store.client.get_run(parent).data.tags["mlflow.note.content"].splitlines()
    assert lines[-1] == "… the rest is in this run's report.html under Artifacts."
    assert note.splitlines()[: len(lines) - 2] == lines[:-2]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"file.*choose another --tracking-dir"), writer(tmp_path / "file"):
        pass


def test_a_database_of_someone_else_is_one_sentence(tmp_path):
    (tmp_path / "mlflow.db").write_text("not a database, but long enough to be looked at by sqlite" * 20)
    with pytest.raises(TrackingError, match=r"mlflow\.db: MLflow cannot open it"), writer(tmp_path):
        pass


def test_a_store_that_was_half_made_is_made_again(tmp_path):
    (tmp_path / "mlflow.db.partial").write_text("left by a process that died")
    with writer(tmp_path) as store:
        assert store.client.get_experiment(store.experiment_id).artifact_location.endswith("/artifacts")
