"""Signals as a terminal and ``timeout`` send them, to the whole process group of a night with a temporary Prefect server."""

from __future__ import annotations

import json
import os
import pty
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.interruption import SENTENCE
from tasks.run.accelerator import accelerator

HUNG_S = 60
STARTED_S = 200


class Terminal:
    """A command in a pseudo-terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.id, self._master = pty.fork()
        if self.id == 0:
            os.execve(command[0], command, environment)  # noqa: S606  ours
        os.set_blocking(self._master, False)
        self.process = psutil.Process(self.id)
        self.shown = b""

    def read(self) -> bytes:
        """Return all that has been shown."""
        try:
            while more := os.read(self._master, 65536):
                self.shown += more
        except OSError:  # nothing more now, or at all
            pass
        return self.shown

    def until(self, moment: Callable[[], object]) -> None:
        due = time.monotonic() + STARTED_S
        while not moment():
            assert not self.ended(), self.read().decode()
            assert time.monotonic() < due, self.read().decode()
            self.read()
            time.sleep(0.02)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def servers(self) -> list[psutil.Process]:
        """Return its server and what guards it, not what runs for a moment, as git does."""
        return [child for child in self.process.children(recursive=True) if serves(child)]

    def ended(self) -> bool:
        return self.process.status() == psutil.STATUS_ZOMBIE

    def wait(self) -> int:
        """Return the exit code."""
        due = time.monotonic() + HUNG_S
        while not self.ended():
            assert time.monotonic() < due, self.read().decode()
            self.read()
            time.sleep(0.02)
        self.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.id, 0)[1])

    def close(self) -> None:
        if self.process.is_running():
            self.process.kill()
            os.waitpid(self.id, 0)
        os.close(self._master)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with an accelerator lock of its own, and a temporary folder for servers' homes."""
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kept = tmp_path_factory.getbasetemp() / "prefect"  # one database is made for all these tests
    kept.mkdir(exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "prefect").symlink_to(kept)
    return tmp_path / "cache"


@pytest.fixture
def night(
    cache: Path, tmp_path: Path, tiny_matrix: dict[str, Any], kivi_command: tuple[str, ...]
) -> Iterator[tuple[Terminal, Path]]:
    """A night in a terminal, and its tracking folder."""
    matrix, tracking_dir = tmp_path / "tiny.yaml", tmp_path / "mlruns"
    matrix.write_text(json.dumps(tiny_matrix))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [*kivi_command, "nightly", "--config", str(matrix), "--tracking-dir", str(tracking_dir)]
    terminal = Terminal(command, {**environment, "TERM": "xterm"})
    yield terminal, tracking_dir
    terminal.close()


def files(folder: Path) -> bool:
    return any(folder.glob("*.json"))


def gone(servers: list[psutil.Process]) -> bool:
    """Return whether all of them end soon; zombies have."""
    return soon(lambda: not any(server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in servers))


def soon(reached: Callable[[], bool]) -> bool:
    due = time.monotonic() + HUNG_S
    while not reached() and time.monotonic() < due:
        time.sleep(0.05)
    return reached()


def serves(process: psutil.Process) -> bool:
    """Return whether a process is a server, or guards one."""
    try:
        return any("uvicorn" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


MOMENTS: dict[str, Callable[[Terminal, Path], object]] = {
    "its server starts": lambda terminal, _: terminal.servers(),
    "it measures": lambda _, tracking_dir: files(tracking_dir / "results"),
    "it logs": lambda _, tracking_dir: files(tracking_dir / "unlogged"),
}
WAYS: dict[str, tuple[Callable[[Terminal], object], int]] = {
    "Ctrl-C": (Terminal.press_ctrl_c, 130),
    "SIGTERM to the group": (lambda terminal: os.killpg(terminal.id, signal.SIGTERM), 143),
    "SIGTERM to the process": (lambda terminal: terminal.process.terminate(), 143),
}


@pytest.mark.parametrize(
    ("way", "moment"),
    [("SIGTERM to the group", "its server starts"), ("Ctrl-C", "it measures"), ("SIGTERM to the process", "it logs")],
)
def test_a_night_ends_at_once_with_one_sentence_and_no_server(night: tuple[Terminal, Path], way: str, moment: str) -> None:
    terminal, tracking_dir = night
    terminal.until(lambda: MOMENTS[moment](terminal, tracking_dir))
    servers = terminal.servers()
    send, code = WAYS[way]
    before, sent = len(terminal.read()), time.monotonic()
    send(terminal)
    assert terminal.wait() == code
    assert time.monotonic() - sent < 10
    said = terminal.shown[before:]
    assert said.count(SENTENCE.strip()) == 1 and said.endswith(SENTENCE.replace(b"\n", b"\r\n")), said
    assert b"failed" not in said and b"Traceback" not in said
    assert servers and gone(servers)
    assert soon(lambda: not list(tracking_dir.parent.glob("kivi-prefect-*"))), "the server's home is left"


@pytest.mark.parametrize("killed", [False, True], ids=["Ctrl-C", "kill -9"])
def test_a_night_that_waits_for_the_accelerator_ends_and_so_does_its_server(
    cache: Path, request: pytest.FixtureRequest, killed: bool
) -> None:
    with accelerator("another", log=print, folder=cache):
        terminal, _ = request.getfixturevalue("night")
        terminal.until(lambda: b"waits for the accelerator" in terminal.read())
        servers, sent = terminal.servers(), time.monotonic()
        terminal.process.kill() if killed else terminal.press_ctrl_c()
        assert terminal.wait() == (-signal.SIGKILL if killed else 130)
        assert time.monotonic() - sent < 10
    assert servers and gone(servers)
    assert terminal.shown.count(SENTENCE.strip()) == (not killed)
