"""Serve MLflow on the local store, and say where to look in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from flows import interruption
from flows.serve.background import POLL_S, end_tree, refusal
from flows.serve.servers import HOST, answers, mlflow_server
from tasks.config import Config
from tasks.paths import compare_path, experiment_path, run_path
from tasks.tracking.nights import find_cells, find_nights
from tasks.tracking.store import TrackingError, writer


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
        listed = address + experiment_path(store.experiment_id)
        if not nights:
            return Links(nights=listed)
        latest = nights[0].info.run_id
        cells = [run.info.run_id for run in find_cells(store, latest)]
        return Links(
            nights=listed,
            latest=address + run_path(store.experiment_id, latest),
            compare=address + compare_path(store.experiment_id, cells),
        )


def serve(tracking_dir: Path, port: int, ready: Callable[[], None]) -> int:
    """Serve until interrupted; return 0 then, or MLflow's exit code, 128 and the number of the signal that ended it.

    The server has a session of its own: a signal of the terminal reaches this process alone, which ends the server, where both
    would answer, MLflow with a traceback. A terminal that is closed therefore has to be heard here, unless ``nohup`` says not.

    Args:
        tracking_dir: Folder of the store.
        port: Port on this machine.
        ready: Called once the server answers.

    Raises:
        TrackingError: the port cannot be used.
    """
    if reason := refusal(HOST, port):
        raise TrackingError(f"port {port}: {reason}; choose another --port")
    owner, _held = os.pipe()  # this process holds the other end until it ends, however it ends
    launch = mlflow_server(tracking_dir, HOST, port, owner=owner)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    command = [*launch.command, "--uvicorn-opts", "--log-level warning"]
    with interruption.left_to_the_block():
        server = subprocess.Popen(  # noqa: S603  ours
            command,
            env=launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=(owner,),
            start_new_session=True,
        )
        os.close(owner)
        try:
            while server.poll() is None and not answers(f"{launch.address}/health"):
                time.sleep(POLL_S)
            if server.poll() is None:
                ready()
            code = server.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:  # SIGTERM is one, too
            return 0
        finally:
            if server.poll() is None:
                end_tree(psutil.Process(server.pid))
