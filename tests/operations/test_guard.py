"""A guarded command does not outlive its owner, nor its children their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from flows.serve.background import Background
from flows.serve.guard import guarded
from flows.serve.servers import answers, launch_mlflow

# A child that does not end when it is asked, with a child of its own.
FAMILY = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.run(['sleep', '600'])"


def family(process: psutil.Process, members: int) -> list[psutil.Process]:
    """Return a process and its children, once there are that many."""
    until = time.monotonic() + 60
    while len(found := [process, *process.children(recursive=True)]) < members:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def ended(processes: list[psutil.Process]) -> bool:
    """Return whether all end soon; zombies have."""
    until = time.monotonic() + 30
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def start():
    """Start a guarded command in a session of its own or in this one, and end what is left of it."""
    found = []

    def run(members, *, new_session=True, **options):
        fds = [options["owner"]] if "owner" in options else []
        command = guarded([sys.executable, "-c", FAMILY], **options)
        process = subprocess.Popen(command, start_new_session=new_session, pass_fds=fds)
        found.extend(family(psutil.Process(process.pid), members))
        return process, list(found)

    yield run
    for process in found:
        if process.is_running():
            process.kill()


def test_children_end_when_their_parent_is_killed(start):
    process, members = start(3)  # with the watcher
    process.kill()
    process.wait()
    assert ended(members)


def test_a_command_and_its_folder_end_with_the_owner(start, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    owner, held = os.pipe()
    process, members = start(3, owner=owner, remove=folder)
    os.close(owner)
    assert process.poll() is None
    os.close(held)  # as the kernel does for an owner that ends
    process.wait(30)
    assert ended(members)
    assert not folder.exists()


def test_in_a_session_that_is_not_its_own_nobody_is_ended(start):
    process, members = start(2, new_session=False)  # without a watcher
    process.kill()
    process.wait()
    assert members[1].is_running() and members[1].status() != psutil.STATUS_ZOMBIE


def test_the_child_of_mlflows_server_ends_when_the_recorded_process_is_killed(tmp_path):
    processes = Background(tmp_path / "servers")
    started = processes.start("mlflow", *launch_mlflow(tmp_path / "mlruns", 5300))
    try:
        processes.wait(started, lambda: answers(f"{started.address}/health"))
        members = family(psutil.Process(started.pid), 3)
        os.kill(started.pid, 9)
        assert ended(members)
    finally:
        processes.end("mlflow")
