"""A night over workers: shared out by Prefect, kept from loss when a worker dies, gated as one that was measured here."""

from __future__ import annotations

import contextvars
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Completed, State

from flows.cell import cell
from flows.fan_out import Dispatch
from flows.serve.background import end_tree
from tasks.config import NightlyConfig
from tasks.run.fan_out import POOL, Job, run_jobs
from tasks.run.night import Night
from tasks.run.result_files import ResultStore

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
    from tasks.run.cells import CellError
    from tasks.run.plan import circumstances

    here = circumstances()
    other = here.model_copy(update={"device": ("Apple M9", "Accelerate")})
    part = Part(what="measure", config=tiny_matrix, keys=("a",), night="n", planned=other)  # type: ignore[arg-type]
    with pytest.raises(CellError, match=r"would measure something else .* instead of \('Apple M9', 'Accelerate'\)"):
        require_same("cell", (), part)


PART = {"what": "measure", "config": {"specs": [{"kind": "full"}]}, "keys": ["a"], "night": "n"}
LOG = logging.getLogger(__name__).warning
PLANNED = {"device": ["a", "b"], "packages": {}, "code": "c"}


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    """A client of a server that has the deployment, and no worker: tests say themselves how runs end."""
    with get_client(sync_client=True) as client:
        if not client.read_work_pools():
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            deployment = cell.to_deployment("cell", work_pool_name=POOL)
            deployment.entrypoint, deployment.storage = "flows/cell.py:cell", None
            deployment.apply()
        yield client


def job(key: str, **parameters: Any) -> Job:
    return Job(key=key, identity=f"{key} {time.monotonic()}", label=f"cell {key}", parameters=parameters)


def started(work: Callable[..., dict[str, str]], *arguments: Any) -> Future[dict[str, str]]:
    """Have something done in a thread, on the server of this one."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(contextvars.copy_context().run, work, *arguments)
    pool.shutdown(wait=False)
    return future


def runs_of(client: SyncPrefectClient, one: Job) -> list[FlowRun]:
    return [run for run in client.read_flow_runs(limit=200) if (run.idempotency_key or "").startswith(one.identity)]


def end(client: SyncPrefectClient, one: Job, state: State) -> None:
    """End a job's run as soon as there is one."""
    due = time.monotonic() + 60
    while time.monotonic() < due:
        for run in runs_of(client, one):
            client.set_flow_run_state(run.id, state, force=True)
            return
        time.sleep(0.2)
    raise AssertionError(f"{one.label} was not given to anyone")


def parameters() -> dict[str, Any]:
    return {"label": "a cell", "part": {**PART, "planned": PLANNED}}


def test_a_cancelled_job_is_not_given_to_another_worker(client: SyncPrefectClient) -> None:
    cancelled, done = job("cancelled", **parameters()), job("done", **parameters())
    future = started(run_jobs, [cancelled, done], LOG)
    end(client, cancelled, Cancelled(message="by hand"))
    end(client, done, Completed())
    assert future.result(60) == {"cancelled": "cell cancelled: its run was cancelled"}
    assert len(runs_of(client, cancelled)) == 1


def test_a_job_whose_run_is_deleted_fails_alone(client: SyncPrefectClient) -> None:
    deleted, done = job("deleted", **parameters()), job("done", **parameters())
    future = started(run_jobs, [deleted, done], LOG)
    end(client, done, Completed())
    while not (found := runs_of(client, deleted)):
        time.sleep(0.2)
    client.delete_flow_run(found[0].id)
    assert future.result(60) == {"deleted": "cell deleted: its run was deleted"}


def test_a_job_that_the_server_refuses_fails_alone(client: SyncPrefectClient) -> None:
    refused, done = job("refused"), job("done", **parameters())
    future = started(run_jobs, [refused, done], LOG)
    end(client, done, Completed())
    failed = future.result(60)
    assert failed.keys() == {"refused"}
    assert failed["refused"].startswith("cell refused: the Prefect server refuses it: ")
    assert "'label' is a required property" in failed["refused"]


@pytest.mark.parametrize("refresh", [True, False])
def test_a_refresh_does_not_take_an_old_result_for_what_its_worker_measured(
    client: SyncPrefectClient, tmp_path: Path, refresh: bool
) -> None:
    """A worker that is done, and whose result went elsewhere: the file that was there before is none of this night's."""
    store = ResultStore(tmp_path / "results")
    old, new = job("old", **parameters()), job("new", **parameters())
    for one in (old, new):
        store.path(one.key).write_text("{}")
    night = Night(name="n", scheduled="n", outcomes=())
    dispatch = Dispatch(NightlyConfig(specs=("full",)), night, store, tmp_path, LOG, refresh)
    future = started(dispatch._do, [old, new], {"old", "new"})
    end(client, old, Completed())
    replaced = tmp_path / "draft"
    replaced.write_text("{}")
    replaced.replace(store.path("new"))
    end(client, new, Completed())
    failed = future.result(60)
    assert failed.keys() == ({"old"} if refresh else set())
    assert all("its worker is done, but its result is not in" in sentence for sentence in failed.values())
