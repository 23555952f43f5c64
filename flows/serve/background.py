"""Processes that outlive the command that started them: recorded in files, found again, and ended by their ids."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import Field

from kivi.files import write_whole
from tasks.config import Config

READY_S = 180.0  # a new database takes Prefect 10 to 30 s, more on a busy machine
END_S = 30.0
POLL_S = 0.2
LOG_LINES = 15


class ServerError(RuntimeError):
    """A server that does not start; the message says which, why, and where its log is."""


class Process(Config):
    """A recorded process. The time it began tells it from a later one with the same id."""

    name: str
    pid: int = Field(gt=0, lt=2**31)
    began: float
    address: str = Field("", pattern=r"^(https?://\S+)?$", description="where it answers, or whom it asks for work")

    def find(self) -> psutil.Process | None:
        """Return the process when it still runs."""
        try:
            process = psutil.Process(self.pid)
            alive = process.create_time() == self.began and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None


class Background:
    """The processes that are recorded in ``folder``, each with its log beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def recorded(self, name: str) -> Process | None:
        """Return what was recorded of a process, whether it still runs or not.

        Raises:
            ServerError: the record is damaged: what it was for may still run, and a second one would get in its way.
        """
        path = self.folder / f"{name}.json"
        try:
            return Process.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            raise ServerError(
                f"{path}: damaged, so {name} cannot be found: end it by hand if it still runs, then remove this file"
            ) from None

    def running(self, name: str) -> Process | None:
        recorded = self.recorded(name)
        return recorded if recorded is not None and recorded.find() is not None else None

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], address: str = "") -> Process:
        """Start a process that does not end with this one, and record it.

        Raises:
            ServerError: its log cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            opened = self.log(name).open("ab")
        except OSError as error:
            raise ServerError(f"{name} cannot be started: {error.filename}: {error.strerror}") from None
        with opened as log:
            started = subprocess.Popen(  # noqa: S603  ours
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process = Process(name=name, pid=started.pid, began=psutil.Process(started.pid).create_time(), address=address)
        write_whole(self.folder / f"{name}.json", process.model_dump_json())
        return process

    def wait(self, process: Process, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``.

        Raises:
            ServerError: the process ended, or took too long; the end of its log is in the message.
        """
        until = time.monotonic() + READY_S
        while not ready():
            if process.find() is None:
                raise ServerError(f"{process.name} ended at once: {self._last_lines(process.name)}")
            if time.monotonic() > until:
                raise ServerError(f"{process.name} is not ready after {READY_S:.0f} s: {self._last_lines(process.name)}")
            time.sleep(POLL_S)

    def end(self, name: str) -> bool:
        """End a recorded process with its children, and forget it; return whether it ran."""
        recorded = self.recorded(name)
        if recorded is None:
            return False
        process = recorded.find()
        if process is not None:
            end_tree(process)
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        return process is not None

    def _last_lines(self, name: str) -> str:
        path = self.log(name)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return f"see {path}, which ends with\n" + "\n".join(lines)


def background(tracking_dir: Path) -> Background:
    """Return the processes that belong to a tracking folder."""
    return Background(tracking_dir.resolve() / "servers")


def end_tree(process: psutil.Process) -> None:
    """Ask a process to end, then its children that are left; kill what does not."""
    children = process.children(recursive=True)
    process.terminate()
    psutil.wait_procs([process], timeout=END_S)
    _, left = psutil.wait_procs(children, timeout=1)
    for child in left:
        child.terminate()
    _, left = psutil.wait_procs([process, *children], timeout=END_S)
    for survivor in left:
        survivor.kill()


def free_port(host: str, wanted: int) -> int:
    """Return the first port from ``wanted`` on that nobody listens on.

    Raises:
        ServerError: it and the 99 after it are all taken, or the host is not an address of this machine.
    """
    reason = ""
    last = min(wanted + 99, 65535)
    for port in range(wanted, last + 1):
        reason = refusal(host, port)
        if not reason:
            return port
    raise ServerError(f"{host}: no port from {wanted} to {last} can be used: {reason}")


def refusal(host: str, port: int) -> str:
    """Return why no server can listen there, e.g. because one does, and nothing where one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
