"""O4: a deadline must stop a cell that runs in a thread, where Prefect's own timeout cannot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from kivi.measure.monitor import DeadlineError, Monitor
from tasks.config import ModelConfig, NightlyConfig, PromptSetConfig
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.run.cells import CellError, loaded_model, run_cell
from tasks.run.plan import Cell, identify, plan
from tasks.run.result_files import ResultStore


def test_a_loop_that_sleeps_past_its_deadline_stops_at_it() -> None:
    monitor = Monitor(deadline_s=0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"sleep: stopped at \d+ of 1000 after .* deadline 0.2 s"):
        for done in range(1000):
            time.sleep(0.01)
            monitor.step("sleep", done, 1000)
    assert time.monotonic() - started < 2


def test_a_submitted_cell_stops_at_its_deadline_and_the_next_one_runs(
    prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig()
    identity = identify(model, loaded_model(model))
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))  # now that the model is loaded: a lock of this test's own
    prompts = load_prompt_set(PromptSetConfig(source="humaneval"))
    store = ResultStore(tmp_path / "results")

    def cell(length: int, deadline_s: float) -> Cell:
        measure = {
            "score": {"length": length},
            "generation": {"continuations": 1, "context": 64, "steps": 2},
            "deadline_s": deadline_s,
        }
        config = NightlyConfig.model_validate({"specs": ["full"], "measure": measure})
        return plan(config, [prompts], [identity]).cells[0]

    @flow(name="night")
    def night() -> list[Any]:
        futures = [run_cell.submit(long, prompts, store), run_cell.submit(short, prompts, store)]
        return [future.result(raise_on_failure=False) for future in futures]

    long, short = cell(8_000, 1.0), cell(64, 600.0)  # the long one would take minutes
    started = time.monotonic()
    failed, finished = night()
    assert time.monotonic() - started < 60
    assert isinstance(failed, CellError)
    assert str(failed).startswith(f"{long.label}: ") and "deadline 1 s" in str(failed)
    assert finished.result.cell_key == short.key
    assert [path.stem for path in store.folder.iterdir()] == [short.key]
