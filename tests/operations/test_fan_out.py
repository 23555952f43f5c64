"""A night over workers: shared out by Prefect, kept from loss when a worker dies, gated as one that was measured here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.background import end_tree

QUEUE = "m4"  # of one class of machine
RUNS_OF_CELLS = {"flow_runs": {"tags": {"all_": ["part"]}}, "sort": "EXPECTED_START_TIME_DESC"}


@pytest.fixture
def second_worker(lab: Any, tmp_path: Path) -> Iterator[psutil.Process]:
    """Another worker for cells, as another machine's would be, which takes those of one queue."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "kivi-cells", "--name", "second", "--limit", "1"]
    command += ["--work-queue", QUEUE]
    with (tmp_path / "second.log").open("w") as log:
        worker = subprocess.Popen(command, env=lab.environment, stdout=log, stderr=log, start_new_session=True)
        process = psutil.Process(worker.pid)
        lab.until(lambda: "second" in {known["name"] for known in online(lab)})
        yield process
        if worker.poll() is None:
            end_tree(process)
        worker.wait(60)


def online(lab: Any) -> list[Any]:
    workers: list[Any] = lab.post("/work_pools/kivi-cells/workers/filter", {}).json()
    return [worker for worker in workers if worker["status"] == "ONLINE"]


def parts(lab: Any) -> list[Any]:
    found: list[Any] = lab.post("/flow_runs/filter", RUNS_OF_CELLS).raise_for_status().json()
    return found


def test_a_night_ends_as_if_measured_here_though_a_worker_dies_half_way(
    lab: Any,
    second_worker: psutil.Process,
    tmp_path: Path,
    tiny_matrix: dict[str, Any],
    store_contents: Callable[[Path], dict[str, Any]],
) -> None:
    tracking_dir = tmp_path / "mlruns"
    config = {**tiny_matrix, "fan_out": "workers", "queue": QUEUE}
    parameters = {"config": config, "tracking_dir": str(tracking_dir)}
    night = lab.start("nightly/nightly", parameters)

    def taken() -> Any:
        return [run for run in parts(lab) if run["labels"].get("kivi.worker") == "second"]

    first = lab.until(taken)[0]
    for process in [second_worker, *second_worker.children(recursive=True)]:  # the machine goes dark
        os.kill(process.pid, signal.SIGKILL)
    run = lab.wait(night)
    assert run["state"]["type"] == "COMPLETED", run["state"]["message"]

    lost = lab.get(f"/flow_runs/{first['id']}")
    assert lost["state"]["type"] == "CRASHED"
    assert "its worker second has not reported since" in lost["state"]["message"]
    held = store_contents(tracking_dir)
    assert len(held["results"]) == 4  # three cells, and their timings
    assert len(held["runs"]) == 4
    assert {described["status"] for described in held["runs"].values()} == {"FINISHED"}

    before = len(parts(lab))
    assert {part["work_queue_name"] for part in parts(lab)} == {QUEUE}
    again = lab.retry(night)
    assert again["state"]["type"] == "COMPLETED", again["state"]["message"]
    assert len(parts(lab)) == before, "what workers had measured was given to them again"
    assert store_contents(tracking_dir) == held


def test_a_worker_of_another_kind_of_machine_refuses(tiny_matrix: dict[str, Any]) -> None:
    from flows.cell import Part, require_same
    from tasks.cells import CellError
    from tasks.plan import circumstances

    here = circumstances()
    other = here.model_copy(update={"device": ("Apple M9", "Accelerate")})
    part = Part(what="measure", config=tiny_matrix, keys=("a",), night="n", planned=other)  # type: ignore[arg-type]
    with pytest.raises(CellError, match=r"would measure something else .* instead of \('Apple M9', 'Accelerate'\)"):
        require_same("cell", (), part)
