"""Cells as tasks: found or measured, under the lock, with progress and a deadline, and failures by name."""

from __future__ import annotations

import errno
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from prefect.futures import wait

from kivi.measure.results import CellResult, metric_values
from tasks.config import ModelConfig, NightlyConfig
from tasks.prompts.prompt_sets import PromptSet, load_prompt_set
from tasks.run.accelerator import accelerator
from tasks.run.cells import CellError, loaded_model, run_cell, run_throughput, watch
from tasks.run.plan import Cell, identify, plan
from tasks.run.result_files import ResultStore, StoreError, ThroughputResult

MEASURE = {
    "score": {"length": 256},
    "generation": {"continuations": 1, "context": 160, "steps": 4},
    "throughput": {"rounds": 2, "contexts": [64], "steps": 2},
}
SPECS = ("full", "kivi-roundtrip:bits=4,residual=32,backend=mlx")


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks and references of this test are its own: it neither waits for another's nor reads them."""
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results")


def cells_of(model: ModelConfig, prompts: PromptSet, **measure: Any) -> tuple[Cell, ...]:
    fields = {"specs": SPECS, "prompt_sets": [{"source": f"{prompts.name}.jsonl", "column": "text"}]}
    config = NightlyConfig.model_validate({**fields, "measure": {**MEASURE, **measure}})
    return plan(config, [prompts], [identify(model, loaded_model(model))]).cells


def test_a_cell_is_measured_once_and_then_found(tiny_models: Any, story: PromptSet, store: ResultStore) -> None:
    cell = cells_of(tiny_models(0), story)[1]
    first = run_cell.fn(cell, story, store)
    assert not first.reused
    assert first.result.cell_key == cell.key
    assert first.result.provenance.prompt_sha256 == story.sha256
    again = run_cell.fn(cell, story, store)
    assert again.reused and again.result == first.result
    anew = run_cell.fn(cell, story, store, refresh=True)
    assert not anew.reused and anew.result.provenance.started > first.result.provenance.started
    assert anew.result.quality.kl_mean == first.result.quality.kl_mean


def test_a_cell_asks_the_questions_of_its_prompt_set(tiny_models: Any, tmp_path: Path, store: ResultStore) -> None:
    path = tmp_path / "facts.jsonl"
    lines = [{"text": f"Sentence {n} says that {n * n} is a square. " * 2 + f"And {n} is", "n": str(n)} for n in range(50)]
    path.write_text("".join(json.dumps({**line, "text": f"{line['text']} {line['n']}"}) + "\n" for line in lines))
    asked = {"source": str(path), "column": "text", "answer": "n"}
    answers = {"scorer": "planted_fact", "questions": 3, "tokens": 4}
    cells = {}
    for name, fields in (("silent", asked), ("asked", {**asked, "answers": answers})):
        config = NightlyConfig.model_validate({"specs": SPECS, "prompt_sets": [fields], "measure": MEASURE})
        prompts = load_prompt_set(config.prompt_sets[0])
        model = tiny_models(0)
        cell = plan(config, [prompts], [identify(model, loaded_model(model))]).cells[1]
        cells[name] = (cell, run_cell.fn(cell, prompts, store).result)
    assert cells["silent"][0].key != cells["asked"][0].key
    assert cells["silent"][1].answers is None and "answers" not in cells["silent"][1].provenance.seconds
    result = cells["asked"][1]
    assert result.answers is not None and result.provenance.seconds["answers"] > 0
    assert [one.expected for one in result.answers.answers] == ["0", "1", "2"]
    assert dict(metric_values(result))["answers.accuracy_full"] == result.answers.accuracy_full
    assert store.read(result.cell_key, CellResult) == result


def test_a_cell_that_was_measured_while_another_waited_for_the_accelerator_is_found(
    tiny_models: Any, story: PromptSet, store: ResultStore, tmp_path: Path, caplog: Any
) -> None:
    cell = cells_of(tiny_models(0), story)[1]
    first = run_cell.fn(cell, story, store).result
    store.path(cell.key).unlink()
    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as threads:
        with accelerator("the same cell elsewhere", log=str):
            waiting = threads.submit(run_cell.fn, cell, story, store)
            until = time.monotonic() + 30
            while "waits for the accelerator" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.01)
            store.write(first)
        again = waiting.result(60)
    assert again.reused and again.result == first


@pytest.mark.parametrize("what", ["cell", "throughput"])
def test_a_result_that_cannot_be_kept_is_an_error_of_the_folder_and_of_no_cell(
    what: str, tiny_models: Any, story: PromptSet, store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cells_of(tiny_models(0), story)
    if what == "throughput":
        for cell in cells:
            run_cell.fn(cell, story, store)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tasks.run.result_files.write_whole", full)
    with pytest.raises(StoreError, match="No space left on device"):
        if what == "cell":
            run_cell.fn(cells[0], story, store)
        else:
            run_throughput.fn("tiny × story", cells, story, store)


def test_a_truncated_result_is_measured_again(tiny_models: Any, story: PromptSet, store: ResultStore, caplog: Any) -> None:
    cell = cells_of(tiny_models(0), story)[0]
    run_cell.fn(cell, story, store)
    path = store.path(cell.key)
    path.write_bytes(path.read_bytes()[:500])
    with caplog.at_level(logging.WARNING):
        assert not run_cell.fn(cell, story, store).reused
    assert "measuring again" in caplog.text
    assert store.read(cell.key, CellResult) is not None


def test_the_result_of_another_cell_is_no_result(make_result: Any, store: ResultStore, caplog: Any) -> None:
    store.write(make_result(key="ab" * 16)).rename(store.path("cd" * 16))
    assert store.read("cd" * 16, CellResult) is None
    assert "holds the result of another cell" in caplog.text


def test_caches_are_timed_together_and_each_result_gets_its_throughput(
    tiny_models: Any, story: PromptSet, store: ResultStore
) -> None:
    cells = cells_of(tiny_models(0), story)
    for cell in cells:
        run_cell.fn(cell, story, store)
    timed = run_throughput.fn("tiny × story", cells, story, store)
    assert not timed.reused and not timed.failed
    for cell in cells:
        kept = store.read(cell.key, CellResult)
        assert kept is not None and kept.throughput is not None
        assert kept == timed.results[cell.key]
    assert timed.results[cells[0].key].throughput.decode_ratio == 1.0
    again = run_throughput.fn("tiny × story", cells, story, store)
    assert again.reused and again.results == timed.results


def test_a_cell_measured_anew_gets_the_timings_that_there_are(tiny_models: Any, story: PromptSet, store: ResultStore) -> None:
    cells = cells_of(tiny_models(0), story)
    for cell in cells:
        run_cell.fn(cell, story, store)
    timed = run_throughput.fn("tiny × story", cells, story, store)
    fresh = run_cell.fn(cells[1], story, store, refresh=True)
    assert fresh.result.throughput is None
    again = run_throughput.fn("tiny × story", cells, story, store)
    assert again.results[cells[1].key].throughput == timed.results[cells[1].key].throughput
    assert len(list(store.folder.glob("throughput-*.json"))) == 1


def test_a_cache_that_could_not_be_timed_is_named_and_the_rest_is_kept(
    tiny_models: Any, story: PromptSet, store: ResultStore
) -> None:
    cells = cells_of(tiny_models(0), story)
    for cell in cells:
        run_cell.fn(cell, story, store)
    timed = run_throughput.fn("tiny × story", cells, story, store)
    path = next(store.folder.glob("throughput-*.json"))
    timings = store.read(path.stem, ThroughputResult)
    assert timings is not None
    store.write(timings.model_copy(update={"arms": {**timings.arms, cells[1].spec.slug: "no kernel for this shape"}}))
    again = run_throughput.fn("tiny × story", cells, story, store)
    assert again.failed == {cells[1].key: f"{cells[1].label}: no kernel for this shape"}
    assert again.results == {cells[0].key: timed.results[cells[0].key]}


def test_a_failure_begins_with_the_cell_and_leaves_no_result(tiny_models: Any, story: PromptSet, store: ResultStore) -> None:
    cell = cells_of(tiny_models(0), story, score={"length": 1_000_000})[1]
    with pytest.raises(CellError) as caught:
        run_cell.fn(cell, story, store)
    assert str(caught.value).startswith(f"{cell.label}: 1 sequences of 1000001 tokens need")
    assert not list(store.folder.iterdir())


def test_progress_goes_to_whoever_watches(tiny_models: Any, story: PromptSet, store: ResultStore) -> None:
    cell = cells_of(tiny_models(0), story)[1]
    seen: list[tuple[str, str, int, int]] = []
    with watch(lambda *step: seen.append(step)):
        run_cell.fn(cell, story, store)
    assert {label for label, *_ in seen} == {cell.label}
    assert len({stage for _, stage, *_ in seen}) >= 2
    assert all(0 <= done <= total for *_, done, total in seen)
    count = len(seen)
    run_cell.fn(cell, story, store, refresh=True)
    assert len(seen) == count  # nobody watches any more


def test_prefect_shows_cells_by_their_names_with_progress_and_failures_as_failed(
    tiny_models: Any, story: PromptSet, store: ResultStore, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.run.cells.ARTIFACT_S", 0.0)
    good = cells_of(tiny_models(0), story)[1]
    bad = cells_of(tiny_models(0), story, score={"length": 1_000_000})[1]
    seen: list[str] = []

    @flow(name="night")
    def night() -> tuple[Any, list[str]]:
        with watch(lambda label, *_: seen.append(label)):
            futures = [run_cell.submit(cell, story, store) for cell in (good, bad)]
            wait(futures)
        return runtime.flow_run.id, [future.state.type.value for future in futures]

    flow_run_id, states = night()
    assert states == ["COMPLETED", "FAILED"]
    assert set(seen) == {good.label}
    assert store.read(good.key, CellResult) is not None
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
        filters = ArtifactFilter(key=ArtifactFilterKey(any_=[f"cell-{good.key}"]))
        (artifact,) = client.read_artifacts(artifact_filter=filters)
    assert {run.name for run in runs} == {good.label, bad.label}
    assert artifact.type == "progress" and artifact.description.startswith(f"{good.label}: ")
