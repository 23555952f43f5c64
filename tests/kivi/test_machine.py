from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from kivi import machine

ROOT = Path(machine.__file__).resolve().parent.parent


def test_hardware_is_named_by_kind_and_never_by_host() -> None:
    assert re.fullmatch(r"cpu: .+, \d+ cores|gpu: .+", machine.device())
    assert socket.gethostname() not in machine.device()
    assert machine.processor()


def test_versions_are_those_that_are_installed() -> None:
    packages = machine.packages()
    assert packages["mlx"] == importlib.metadata.version("mlx")
    assert set(machine.PACKAGES) < set(packages)


def test_the_state_of_the_code_is_the_checkouts() -> None:
    state = machine.git_state.__wrapped__()
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert state.sha == head.stdout.strip()
    else:
        assert state.sha.startswith("no checkout, kivi-mlx")


def test_a_changed_file_makes_the_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "kivi").mkdir()
    module = tmp_path / "kivi" / "machine.py"
    module.write_text("x = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(machine, "__file__", str(module))
    assert not machine.git_state.__wrapped__().dirty
    os.utime(module, (0, 0))  # git would now write its index anew, under a lock that a killed process leaves behind
    index = (tmp_path / ".git" / "index").read_bytes()
    assert not machine.git_state.__wrapped__().dirty
    assert (tmp_path / ".git" / "index").read_bytes() == index
    module.write_text("x = 2\n")
    assert machine.git_state.__wrapped__().dirty


def test_without_a_checkout_the_version_says_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "kivi" / "machine.py"))
    assert machine.git_state.__wrapped__().sha.startswith("no checkout, kivi-mlx ")
