"""The servers of one machine, for ``make up`` and ``make down``: Prefect, MLflow, and workers for the deployments.

They are configured as Prefect and MLflow always are, by their own environment variables; what is not set is local:

- ``PREFECT_SERVER_API_HOST``, ``PREFECT_SERVER_API_PORT``, ``MLFLOW_HOST``, ``MLFLOW_PORT``: where they listen, 127.0.0.1 at
  4200 and 5050, or the next free port when nothing is set;
- ``PREFECT_API_DATABASE_CONNECTION_URL``: Prefect's database, sqlite in ``<tracking dir>/servers/prefect`` by default;
- ``MLFLOW_BACKEND_STORE_URI``, ``MLFLOW_ARTIFACTS_DESTINATION``: MLflow's database and files, the tracking folder's by
  default. With another database the worker logs through the MLflow server.

Starting again starts what is missing. What is started is recorded in ``<tracking dir>/servers``, with its log.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from flows.background import Background, Process, ServerError, free_port
from flows.deployments import POOL, deploy
from tasks.fan_out import POOL as CELLS_POOL
from tasks.places import ARTIFACTS, UI_PORT
from tasks.tracking_store import TRACKING_URI, database_uri, writer

HOST = "127.0.0.1"
PREFECT_PORT = 4200
NAMES = ("prefect", "mlflow", "worker", "cells")
QUERY_S = "2"  # between two looks of a worker for work; Prefect's 10 s would be the idle time between short cells
BACKEND = "MLFLOW_BACKEND_STORE_URI"


class Addresses(NamedTuple):
    """Where the two servers answer."""

    prefect: str
    mlflow: str


def background(tracking_dir: Path) -> Background:
    """Return the processes that belong to a tracking folder."""
    return Background(tracking_dir.resolve() / "servers")


def up(tracking_dir: Path, project: Path) -> Addresses:
    """Start what does not run yet, deploy ``project``'s prefect.yaml, and return where to look.

    Raises:
        ServerError: a server does not start, or a deployment is refused.
        TrackingError: the tracking folder cannot be used.
    """
    processes = background(tracking_dir)
    if BACKEND not in os.environ:
        with writer(tracking_dir):  # makes the database: servers that start on a new one at once break it
            pass
    prefect = processes.running("prefect") or _start_prefect(processes)
    mlflow = processes.running("mlflow") or _start_mlflow(processes, tracking_dir)
    processes.wait(prefect, lambda: answers(f"{prefect.address}/api/health"))
    processes.wait(mlflow, lambda: answers(f"{mlflow.address}/health"))
    worker = processes.running("worker") or _start_worker(processes, prefect, mlflow, "worker", POOL)
    cells = processes.running("cells") or _start_worker(processes, prefect, mlflow, "cells", CELLS_POOL, "--limit", "1")
    processes.wait(worker, lambda: worker_is_online(prefect.address, POOL))
    processes.wait(cells, lambda: worker_is_online(prefect.address, CELLS_POOL))
    deploy(f"{prefect.address}/api", project, _home(processes))
    return Addresses(prefect.address, mlflow.address)


def down(tracking_dir: Path) -> list[str]:
    """End what :func:`up` started, the worker first; return the names of what ran."""
    processes = background(tracking_dir)
    return [name for name in reversed(NAMES) if processes.end(name)]


def state(tracking_dir: Path) -> Iterator[tuple[str, Process, str]]:
    """Yield for each recorded process its name, the record, and what is wrong with it, nothing when all is well."""
    processes = background(tracking_dir)
    for name, path in (("prefect", "/api/health"), ("mlflow", "/health"), ("worker", ""), ("cells", "")):
        recorded = processes.recorded(name)
        if recorded is None:
            continue
        trouble = ""
        if recorded.find() is None:
            trouble = f"process {recorded.pid} has ended, its log is {processes.log(name)}"
        elif path and not answers(recorded.address + path):
            trouble = f"{recorded.address} does not answer, its log is {processes.log(name)}"
        yield name, recorded, trouble


def answers(url: str) -> bool:
    """Return whether a server says that it is healthy."""
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


def worker_is_online(prefect: str, pool: str) -> bool:
    """Return whether this machine's worker has reported to the Prefect server."""
    try:
        found = httpx.post(f"{prefect}/api/work_pools/{pool}/workers/filter", json={}, timeout=5)
        return found.is_success and any(
            worker["name"] == platform.node() and worker["status"] == "ONLINE" for worker in found.json()
        )
    except httpx.HTTPError:
        return False


def _start_prefect(processes: Background) -> Process:
    host, port = _listen("PREFECT_SERVER_API", PREFECT_PORT)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
    return processes.start("prefect", command, _home(processes), f"http://{host}:{port}")


def _start_mlflow(processes: Background, tracking_dir: Path) -> Process:
    host, port = _listen("MLFLOW", UI_PORT)
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    settings = {
        # By environment, not argument: a database's address may hold a password, and arguments are for all to see.
        BACKEND: database_uri(tracking_dir),
        "MLFLOW_ARTIFACTS_DESTINATION": (tracking_dir.resolve() / ARTIFACTS).as_uri(),
        # Jobs are for MLflow's own evaluations: more processes, and nothing that is used here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
    }
    return processes.start("mlflow", command, settings, f"http://{host}:{port}")


def _start_worker(processes: Background, prefect: Process, mlflow: Process, name: str, pool: str, *options: str) -> Process:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", pool]
    settings = {**_home(processes), "PREFECT_API_URL": f"{prefect.address}/api"}
    settings.setdefault("PREFECT_WORKER_QUERY_SECONDS", QUERY_S)
    if BACKEND in os.environ:
        settings.setdefault(TRACKING_URI, mlflow.address)
    return processes.start(name, [*command, "--name", platform.node(), *options], settings)


def _listen(prefix: str, default: int) -> tuple[str, int]:
    """Return host and port: as the environment says, which must be free, or the next free one."""
    host = os.environ.get(f"{prefix}_HOST", HOST)
    wanted = os.environ.get(f"{prefix}_PORT")
    if wanted is None:
        return host, free_port(host, default)
    if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
        raise ServerError(f"{prefix}_PORT={wanted!r}: expected a port, 1 to 65535")
    if free_port(host, int(wanted)) != int(wanted):
        raise ServerError(f"{prefix}_PORT={wanted}: the port is taken; choose another, or leave it unset to find a free one")
    return host, int(wanted)


def _home(processes: Background) -> dict[str, str]:
    """Return the environment with a home for Prefect beside the store, so that no profile of the user has a say."""
    return {**os.environ, "PREFECT_HOME": os.environ.get("PREFECT_HOME", str(processes.folder / "prefect"))}


def main(arguments: list[str]) -> int:
    """Run ``python -m flows.servers up|down [TRACKING_DIR]``; return the exit code."""
    what, tracking_dir = arguments[0] if arguments else "", Path(*arguments[1:2] or ["mlruns"])
    if what not in {"up", "down"} or len(arguments) > 2:
        sys.stderr.write("usage: python -m flows.servers up|down [TRACKING_DIR]\n")
        return 2
    if what == "down":
        ended = down(tracking_dir)
        sys.stdout.write(f"ended: {', '.join(ended) or 'nothing ran'}\n")
        return 0
    try:
        addresses = up(tracking_dir, Path.cwd())
    except RuntimeError as error:
        sys.stderr.write(f"kivi: {error}\n")
        return 1
    sys.stdout.write(
        f"Prefect  {addresses.prefect}\nMLflow   {addresses.mlflow}\n"
        f"In this shell, so that prefect and kivi find the server: export PREFECT_API_URL={addresses.prefect}/api\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
