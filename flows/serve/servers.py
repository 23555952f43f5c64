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

import io
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from flows.serve.background import Background, Process, ServerError, background, free_port, refusal
from flows.serve.deployments import FILE, POOL, TEMPLATE, client, deploy, prepare_pools
from flows.serve.guard import guarded
from tasks.config import ConfigError
from tasks.paths import ARTIFACTS, UI_PORT
from tasks.tracking.store import TRACKING_URI, TrackingError, database_uri, require_address, writer

HOST = "127.0.0.1"
PREFECT_PORT = 4200
NAMES = ("prefect", "mlflow", "worker", "cells")
QUERY_S = "2"  # between two looks of a worker for work; Prefect's 10 s would be the idle time between short cells
BACKEND = "MLFLOW_BACKEND_STORE_URI"
PREFECT, MLFLOW = "PREFECT_SERVER_API", "MLFLOW"  # what the variables of their hosts and ports begin with
Port = TypeAdapter(Annotated[int, Field(ge=1, le=65535)])


class Addresses(NamedTuple):
    """Where the two servers answer."""

    prefect: str
    mlflow: str


def up(tracking_dir: Path, project: Path, say: Callable[[str], object]) -> Addresses:
    """Start what does not run yet, deploy ``project``'s prefect.yaml, and return where to look.

    Args:
        tracking_dir: Folder of the MLflow store and of the servers' records.
        project: Folder of prefect.yaml.
        say: Told of each step that takes a while, as it begins.

    Raises:
        ServerError: a server does not start, or a deployment is refused.
        ConfigError: a port of the environment is none, or ``project`` has no prefect.yaml.
        TrackingError: the tracking folder cannot be used.
    """
    processes = _processes(tracking_dir)
    if not (project / FILE).is_file():
        raise ConfigError(f"{project}: no {FILE} to deploy; start from the project's folder")
    for prefix in (PREFECT, MLFLOW):  # before anything is started
        _wanted_port(prefix)
    for name in NAMES:  # a damaged record, likewise
        processes.running(name)

    def start(name: str, launch: Callable[[], Launch]) -> Process:
        return processes.running(name) or processes.start(name, *launch())

    pools = (("worker", POOL), ("cells", _cells_pool()))
    say("starting Prefect's server and MLflow's: half a minute the first time")
    prefect = start("prefect", lambda: launch_prefect(processes.folder, _port(processes, "prefect", PREFECT_PORT)))
    mlflow = start("mlflow", lambda: launch_mlflow(tracking_dir, _port(processes, "mlflow", UI_PORT)))
    processes.wait(prefect, lambda: answers(f"{prefect.address}/api/health"))
    say(f"Prefect's server answers at {prefect.address}")
    processes.wait(mlflow, lambda: answers(f"{mlflow.address}/health"))
    say(f"MLflow's server answers at {mlflow.address}")
    api, through = f"{prefect.address}/api", mlflow.address if BACKEND in os.environ else ""
    prepare_pools(api, project)
    say("starting the workers")
    workers = {}
    for name, pool in pools:
        present = processes.running(name)
        if present is not None and present.address != api:  # the server has come back elsewhere
            processes.end(name)
        workers[pool] = start(name, partial(launch_worker, name, processes.folder, api, through))
    for pool, worker in workers.items():
        processes.wait(worker, partial(worker_is_online, prefect.address, pool))
    say("deploying the flows")
    deploy(api, project, _home(processes.folder))
    return Addresses(prefect.address, mlflow.address)


def down(tracking_dir: Path) -> list[str]:
    """End what :func:`up` started, the worker first; return the names of what ran.

    Raises:
        ServerError: a record is damaged.
        TrackingError: the tracking folder is none.
    """
    processes = _processes(tracking_dir)
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
        with client(f"{prefect}/api") as server:
            workers = server.read_workers_for_work_pool(pool)
    except httpx.HTTPError:
        return False
    return any(worker.name == platform.node() and worker.status == "ONLINE" for worker in workers)


class Launch(NamedTuple):
    """How a server or worker is started."""

    command: list[str]
    environment: dict[str, str]
    address: str = ""


def run(name: str, tracking_dir: Path) -> NoReturn:
    """Become one server or worker, in the foreground, as systemd and launchd want it.

    Workers go to the server at ``PREFECT_API_URL``, by default this machine's.

    Raises:
        ServerError: its port is taken, or its folder cannot be made.
        ConfigError: a port of the environment is none.
        TrackingError: the tracking folder cannot be used.
    """
    home = _processes(tracking_dir).folder
    try:
        Path(_home(home)["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServerError(f"{name} cannot be started: {error.filename}: {error.strerror}") from None
    api = os.environ.get("PREFECT_API_URL", f"http://{HOST}:{PREFECT_PORT}/api")
    launch = {
        "prefect": lambda: launch_prefect(home),
        "mlflow": lambda: launch_mlflow(tracking_dir),
        "worker": lambda: launch_worker("worker", home, api),
        "cells": lambda: launch_worker("cells", home, api),
    }[name]()
    os.execve(launch.command[0], launch.command, launch.environment)  # noqa: S606  ours


def launch_prefect(folder: Path, port: int = PREFECT_PORT) -> Launch:
    """Return how Prefect's server is started, with its database in ``folder`` unless the environment names another."""
    host, port = _listen(PREFECT, port)
    settings = {**_home(folder), f"{PREFECT}_HOST": host, f"{PREFECT}_PORT": str(port)}
    return Launch([sys.executable, "-m", "flows.serve.prefect_server"], settings, f"http://{host}:{port}")


def launch_mlflow(tracking_dir: Path, port: int = UI_PORT) -> Launch:
    """Return how MLflow's server is started; a local database is made first: servers that start on a new one break it."""
    if BACKEND not in os.environ:
        with writer(tracking_dir):
            pass
    return mlflow_server(tracking_dir, *_listen(MLFLOW, port), os.environ)


def mlflow_server(
    tracking_dir: Path, host: str, port: int, instead: Mapping[str, str] | None = None, owner: int | None = None
) -> Launch:
    """Return how MLflow's server is started on a tracking folder's store, or on what the variables of ``instead`` name.

    With ``owner``, a descriptor as :func:`flows.serve.guard.guarded` takes it, the server ends with its owner.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    settings = {
        **os.environ,
        # By environment, not argument: a database's address may hold a password, and arguments are for all to see.
        BACKEND: database_uri(tracking_dir),
        "MLFLOW_ARTIFACTS_DESTINATION": (tracking_dir.resolve() / ARTIFACTS).as_uri(),
        # Jobs are for MLflow's own evaluations: more processes, and nothing that is used here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **(instead or {}),
    }
    return Launch(guarded(command, owner=owner), settings, f"http://{host}:{port}")  # it leaves the serving to a child


def launch_worker(name: str, folder: Path, api: str, mlflow: str = "") -> Launch:
    """Return how a worker is started: ``worker`` for whole flows, ``cells`` for cells, one at a time.

    Args:
        name: Which of the two.
        folder: Where Prefect's own files are.
        api: The Prefect server.
        mlflow: The MLflow server to log through, where the database is not the tracking folder's.
    """
    pool, options = (POOL, []) if name == "worker" else (_cells_pool(), ["--limit", "1"])
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", pool]
    command += ["--base-job-template", str(TEMPLATE)]  # of a pool that is not there yet
    settings = {**_home(folder), "PREFECT_API_URL": api}
    settings.setdefault("PREFECT_WORKER_QUERY_SECONDS", QUERY_S)
    if mlflow:
        settings.setdefault(TRACKING_URI, mlflow)
    return Launch([*command, "--name", platform.node(), *options], settings, api)


def _cells_pool() -> str:
    """Return the pool of the workers for cells. What Prefect, imported for it, prints of a bad setting is in its error, too."""
    with redirect_stderr(io.StringIO()):
        from tasks.run.fan_out import POOL as CELLS_POOL
    return CELLS_POOL


def _processes(tracking_dir: Path) -> Background:
    """Return the processes of a tracking folder.

    Raises:
        TrackingError: it is a file, or cannot be used.
    """
    require_address(tracking_dir)
    try:
        next(tracking_dir.iterdir(), None)
    except FileNotFoundError:  # the first start makes it
        pass
    except OSError as error:
        raise TrackingError(f"{tracking_dir}: {error.strerror}; choose another tracking folder") from None
    return background(tracking_dir)


def _port(processes: Background, name: str, default: int) -> int:
    """Return the port that a server had before, so that whoever knows it finds the server again."""
    recorded = processes.recorded(name)
    if recorded is None:
        return default
    return httpx.URL(recorded.address).port or default


def _listen(prefix: str, default: int) -> tuple[str, int]:
    """Return host and port: as the environment says, which must be free, or the next free one."""
    host = os.environ.get(f"{prefix}_HOST", HOST)
    wanted = _wanted_port(prefix)
    if wanted is None:
        return host, free_port(host, default)
    if reason := refusal(host, wanted):
        raise ServerError(f"{prefix}_PORT={wanted}: {reason}; choose another, or leave it unset to find a free one")
    return host, wanted


def _wanted_port(prefix: str) -> int | None:
    """Return the port that the environment names, if it does.

    Raises:
        ConfigError: it is no port.
    """
    given = os.environ.get(f"{prefix}_PORT")
    if given is None:
        return None
    try:
        return Port.validate_python(given)
    except ValidationError:
        raise ConfigError(f"{prefix}_PORT={given!r:.80}: expected a port, 1 to 65535; correct it, or unset it") from None


def _home(folder: Path) -> dict[str, str]:
    """Return the environment with a home for Prefect beside the store, so that no profile of the user has a say."""
    return {**os.environ, "PREFECT_HOME": os.environ.get("PREFECT_HOME", str(folder / "prefect"))}
