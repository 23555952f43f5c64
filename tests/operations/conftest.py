"""Servers and workers as ``make up`` starts them, a matrix of short cells, and what a store holds, comparable with another.

Here are the tests of flows with real servers, workers and processes that are killed; tests/flows has the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.serve.background import background
from flows.serve.servers import NAMES
from tasks.config import ModelConfig
from tasks.tracking.store import writer

Matrix = dict[str, Any]
# What differs from one run of a measurement to the next: times, and what the allocator holds.
MEASURED_ANEW = ("throughput.", "memory.peak", "memory.process_peak", "memory.growth")


@pytest.fixture(scope="session")
def tiny_matrix(tiny_models: Callable[[int], ModelConfig], tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Three caches of a tiny model on a tiny prompt set, with limits that random weights keep."""
    rows = tmp_path_factory.mktemp("prompts") / "story.jsonl"
    sentences = (f"Sentence {n} says that {n * n} is a square. " * 4 for n in range(8))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    return {
        "name": "tiny",
        "models": [tiny_models(1).name],
        "prompt_sets": [{"source": str(rows), "column": "text"}],
        "specs": ["full", "kivi-roundtrip:bits=4,residual=32", "kivi:bits=2,residual=32"],
        "measure": {
            "score": {"length": 128},
            "generation": {"continuations": 1, "context": 64, "steps": 4},
            "throughput": {"rounds": 1, "contexts": [64], "steps": 2},
            "deadline_s": 300,
        },
        "reference_gb": 0,
        "thresholds": {"*": {"kl_mean": 100, "flip_rate": 1}},
        "tolerances": {},
    }


def contents(tracking_dir: Path) -> dict[str, Any]:
    """Return what the store and the folder of results hold, by what it is called, without ids and times."""
    with writer(tracking_dir) as store:
        runs = [
            run
            for run in store.client.search_runs([store.experiment_id], max_results=1000)
            if "kivi.superseded" not in run.data.tags
        ]
        described = {}
        for run in runs:
            run_id, tags = run.info.run_id, run.data.tags
            curves = {name: store.client.get_metric_history(run_id, name) for name in run.data.metrics}
            points = {name: [(point.step, point.value) for point in curve] for name, curve in curves.items()}
            described[tags["kivi.kind"] + " " + tags.get("kivi.cell_key", "")] = {
                "status": run.info.status,
                "verdict": tags.get("kivi.verdict"),
                "params": run.data.params,
                "points": {name: points[name] for name in points if not name.startswith(MEASURED_ANEW)},
                "lengths": {name: len(curve) for name, curve in curves.items()},
                "files": sorted(file.path for file in store.client.list_artifacts(run_id)),
            }
        assert len(described) == len(runs), "a cell or a night has several runs"
    return {
        "runs": described,
        "results": sorted(path.name for path in (tracking_dir / "results").iterdir()),
        "unlogged": [path.name for path in (tracking_dir / "unlogged").iterdir()],
    }


@pytest.fixture(scope="session")
def store_contents() -> Callable[[Path], dict[str, Any]]:
    """The function that describes a store; see :func:`contents`."""
    return contents


PROJECT = Path(__file__).parents[2]
RUN_S = 300


class Lab:
    """Servers and workers of their own, started by the same command as ``make up``."""

    def __init__(self, folder: Path) -> None:
        self.tracking_dir = folder / "mlruns"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = {
            **own,
            "KIVI_CACHE_DIR": str(folder / "cache"),  # an accelerator lock of its own
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "3",
            "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "3",
        }
        started = self.servers("up")
        assert started.returncode == 0, started.stdout + started.stderr
        addresses = [line.split()[1] for line in started.stdout.splitlines()[:2]]
        self.prefect_address, self.mlflow_address = addresses
        self.api = f"{self.prefect_address}/api"
        self.environment["PREFECT_API_URL"] = self.api
        self.environment["PREFECT_HOME"] = str(self.tracking_dir / "servers" / "prefect")

    def servers(self, what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.servers", what, str(self.tracking_dir)]
        proxied = {**self.environment, "http_proxy": "http://127.0.0.1:9"}  # nobody listens: nothing local goes there
        return subprocess.run(command, cwd=PROJECT, env=proxied, capture_output=True, text=True, timeout=500)

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, cwd=PROJECT, env=self.environment, capture_output=True, text=True, timeout=RUN_S)

    def ask(self, method: str, path: str, content: Any = None) -> httpx.Response:
        """Ask Prefect's server, again when its sqlite database is locked, as Prefect's own client does."""
        for pause in (0.5, 1, 2, 4, 8):
            answer = httpx.request(method, self.api + path, json=content, timeout=60)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(pause)
        return answer

    def post(self, path: str, content: Any) -> httpx.Response:
        return self.ask("POST", path, content)

    def patch(self, path: str, content: Any) -> None:
        self.ask("PATCH", path, content).raise_for_status()

    def delete(self, path: str) -> None:
        self.ask("DELETE", path).raise_for_status()

    def get(self, path: str) -> Any:
        return self.ask("GET", path).raise_for_status().json()

    def deployment(self, name: str) -> Any:
        return self.get(f"/deployments/name/{name}")

    def start(self, name: str, parameters: dict[str, Any]) -> str:
        """Ask for a run of a deployment; return its id."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        state = {"type": "SCHEDULED"}
        return str(self.post(path, {"parameters": parameters, "state": state}).raise_for_status().json()["id"])

    def wait(self, run_id: str) -> Any:
        """Return a flow run once it has ended."""
        return self.until(lambda: self.ended(run_id))

    def ended(self, run_id: str) -> Any:
        run = self.get(f"/flow_runs/{run_id}")
        return run if run["state"]["type"] in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"} else None

    def retry(self, run_id: str) -> Any:
        """Retry a flow run as Prefect's page does, and return it once it has ended."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        path = f"/flow_runs/{run_id}/set_state"
        self.post(path, {"state": state, "force": True}).raise_for_status()
        return self.wait(run_id)

    def run(self, name: str, parameters: dict[str, Any]) -> Any:
        return self.wait(self.start(name, parameters))

    def until(self, found: Callable[[], Any]) -> Any:
        """Return what ``found`` finds, as soon as it does."""
        due = time.monotonic() + RUN_S
        while time.monotonic() < due:
            value = found()
            if value:
                return value
            time.sleep(0.5)
        raise AssertionError(f"nothing found in {RUN_S} s; logs are in {self.tracking_dir / 'servers'}")

    def events(self, name: str) -> list[Any]:
        """Return the events of a name, once there is one: they are written a moment after they are emitted."""
        content = {"filter": {"event": {"name": [name]}}}
        found: list[Any] = self.until(lambda: self.post("/events/filter", content).raise_for_status().json()["events"])
        return found

    def processes(self) -> list[int]:
        """Return the ids of what was started."""
        running = [background(self.tracking_dir).running(name) for name in NAMES]
        return [process.pid for process in running if process is not None]

    def tree(self, name: str) -> list[psutil.Process]:
        """Return a process that was started, and its children."""
        recorded = background(self.tracking_dir).running(name)
        process = recorded.find() if recorded else None
        assert process is not None
        return [process, *process.children(recursive=True)]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Servers and workers that end with the tests."""
    folder = tmp_path_factory.mktemp("lab")
    try:
        lab = Lab(folder)
        yield lab
        running = lab.processes()
        assert len(running) == len(NAMES), "a server or a worker has ended on its own"
    finally:
        command = [sys.executable, "-m", "flows.servers", "down", str(folder / "mlruns")]
        subprocess.run(command, cwd=PROJECT, check=True, timeout=200)
    assert not any(psutil.pid_exists(process) for process in running)
