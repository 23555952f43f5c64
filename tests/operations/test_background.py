"""Processes in the background: found again, ended with their children, and never mistaken for another's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows.serve.background import Background, Process, ServerError, free_port
from flows.servers import main

PARENT = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]


def children_of(process: psutil.Process) -> list[psutil.Process]:
    for _ in range(600):
        children = process.children()
        if children:
            return children
        time.sleep(0.05)
    raise AssertionError("no child")


def test_these_tests_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Two sets of servers at once take each other's ports."""
    assert "PYTEST_XDIST_WORKER" not in os.environ or request.node.nodeid.endswith("@servers")


def test_a_process_is_found_again_and_ended_with_its_children(tmp_path: Path) -> None:
    started = Background(tmp_path).start("one", PARENT, dict(os.environ))
    later = Background(tmp_path)  # as another command sees it
    assert later.running("one") == started
    process = started.find()
    assert process is not None
    family = [process, *children_of(process)]
    assert later.end("one")
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family)
    assert later.running("one") is None
    assert not later.end("one")


def test_a_process_that_took_the_id_of_a_recorded_one_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        record = Process(name="one", pid=other.pid, began=psutil.Process(other.pid).create_time() - 1)
        (tmp_path / "one.json").write_text(record.model_dump_json())
        assert Background(tmp_path).running("one") is None
        assert not Background(tmp_path).end("one")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    processes = Background(tmp_path)
    started = processes.start("one", [sys.executable, "-c", "raise SystemExit('no such database')"], dict(os.environ))
    with pytest.raises(ServerError, match=r"one ended at once: see .*one.log, which ends with\nno such database"):
        processes.wait(started, lambda: False)
    os.waitpid(started.pid, os.WNOHANG)


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", port) > port


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("PREFECT_SERVER_API_PORT", str(taken.getsockname()[1]))
        assert main(["up", str(tmp_path)]) == 1
    assert "Address already in use; choose another" in capsys.readouterr().err
    assert not (tmp_path / "servers" / "prefect.json").exists()


@pytest.mark.parametrize("arguments", [[], ["start"], ["run"], ["run", "nothing"], ["up", "a", "b"]])
def test_other_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_signals_of_the_terminal_do_not_reach_what_runs_in_the_background(tmp_path: Path) -> None:
    started = Background(tmp_path).start("one", ["sleep", "600"], dict(os.environ))
    assert os.getsid(started.pid) == started.pid != os.getsid(0)
    os.kill(started.pid, signal.SIGKILL)
    os.waitpid(started.pid, 0)
