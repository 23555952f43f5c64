"""Processes of a deployed night are killed: its own, its worker, the Prefect server. Retried, it goes on where it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kivi.measure.results import CellResult
from tasks.run.result_files import checked


def results(tracking_dir: Path) -> dict[str, str]:
    """Return when each finished cell was measured, by its key."""
    files = (path for path in (tracking_dir / "results").glob("*.json") if not path.stem.startswith("throughput-"))
    return {path.stem: str(CellResult.model_validate_json(checked(path.read_bytes())).provenance.started) for path in files}


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=30)


def own_process(lab: Any) -> list[psutil.Process]:
    """The processes of flow runs that the lab's worker has started."""
    return list(lab.tree("worker")[1:])


def server_and_worker(lab: Any) -> list[psutil.Process]:
    """The Prefect server and the worker itself, without what it has started."""
    return [*lab.tree("prefect"), lab.tree("worker")[0]]


@pytest.mark.parametrize("victims", [own_process, server_and_worker])
def test_a_night_whose_processes_are_killed_goes_on_where_it_was(
    lab: Any,
    tmp_path: Path,
    tiny_matrix: dict[str, Any],
    store_contents: Callable[[Path], dict[str, Any]],
    victims: Callable[[Any], list[psutil.Process]],
) -> None:
    tracking_dir = tmp_path / "mlruns"
    night = lab.start("nightly/nightly", {"config": tiny_matrix, "tracking_dir": str(tracking_dir)})
    lab.until(lambda: results(tracking_dir))
    orphans = own_process(lab)
    kill(victims(lab))
    before = results(tracking_dir)
    assert lab.servers("up").returncode == 0  # starts what is missing
    lab.until(lambda: not any(process.is_running() for process in orphans))
    run = lab.get(f"/flow_runs/{night}")
    if run["state"]["type"] != "COMPLETED":  # a night that the server did not see end can be retried as a crashed one
        run = lab.retry(night)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]
    after = results(tracking_dir)
    assert len(after) == 3
    assert {key: after[key] for key in before} == before, "a finished cell was measured again"
    held = store_contents(tracking_dir)
    assert len(held["runs"]) == 4
    assert {described["status"] for described in held["runs"].values()} == {"FINISHED"}
