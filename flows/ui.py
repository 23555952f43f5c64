"""Serve MLflow on the local store, and say where to look in it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.background import POLL_S
from flows.servers import answers
from tasks import places
from tasks.config import Config
from tasks.places import ARTIFACTS
from tasks.track import find_cells, find_nights
from tasks.tracking_store import TrackingError, database_uri, writer

HOST = "127.0.0.1"


class Links(Config):
    """Addresses in the user interface."""

    nights: str
    latest: str | None = None
    compare: str | None = None


def links(tracking_dir: Path, port: int) -> Links:
    """Return the addresses of the list of nights, the latest night and its compare page."""
    address = f"http://{HOST}:{port}/"
    with writer(tracking_dir) as store:
        nights = find_nights(store)
        listed = address + places.experiment_path(store.experiment_id)
        if not nights:
            return Links(nights=listed)
        latest = nights[0].info.run_id
        cells = [run.info.run_id for run in find_cells(store, latest)]
        return Links(
            nights=listed,
            latest=address + places.run_path(store.experiment_id, latest),
            compare=address + places.compare_path(store.experiment_id, cells),
        )


def serve(tracking_dir: Path, port: int, ready: Callable[[], None]) -> int:
    """Serve until interrupted; return MLflow's exit code, or 128 and the number of the signal that ended it, as shells do.

    Args:
        tracking_dir: Folder of the store.
        port: Port on this machine.
        ready: Called once the server answers.

    Raises:
        TrackingError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise TrackingError(f"port {port}: {error.strerror}; choose another --port") from None
    artifacts = tracking_dir.resolve() / ARTIFACTS
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database_uri(tracking_dir)]
    command += ["--artifacts-destination", artifacts.as_uri(), "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--uvicorn-opts", "--log-level warning"]
    # Jobs are for MLflow's own evaluations: more processes, and nothing that is used here.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr)  # noqa: S603  ours
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    try:
        while server.poll() is None and not answers(f"http://{HOST}:{port}/health"):
            time.sleep(POLL_S)
        if server.poll() is None:
            ready()
        code = server.wait()
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        server.terminate()  # never killed: MLflow's command passes a termination on to the server behind it
        server.wait()
        return 0
