"""What a result was measured on: hardware by kind, versions, the state of the code. Never a host's name."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from kivi.blas import BLAS

PACKAGES = ("kivi-mlx", "mlx", "mlx-lm", "numpy", "scipy", "transformers")


class GitState(NamedTuple):
    """The commit of the code that runs, and whether tracked files differ from it."""

    sha: str
    dirty: bool


@functools.cache
def processor() -> str:
    """Return the processor's model, e.g. ``Apple M4 Max`` or ``AMD EPYC``."""
    cpu: dict[str, Any] = mx.device_info(mx.Device(mx.cpu))
    return str(cpu.get("device_name") or platform.processor() or platform.machine())


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device() -> str:
    """Return where MLX runs by default, e.g. ``cpu: AMD EPYC, 2 cores`` or ``gpu: Apple M4 Max``."""
    if mx.default_device() == mx.gpu:
        return f"gpu: {mx.device_info().get('device_name', 'unknown')}"
    return f"cpu: {processor()}, {cores()} cores"


@functools.cache
def packages() -> dict[str, str]:
    """Return the versions of what bears on a measurement, and of Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def provenance() -> dict[str, Any]:
    """Return what every result says of where it comes from: device, BLAS, packages, and the commit of the code."""
    git = git_state()
    return {"device": device(), "blas": BLAS, "packages": packages(), "git_sha": git.sha, "git_dirty": git.dirty}


@functools.cache
def git_state() -> GitState:
    """Return the state of the checkout that this code runs from; an installed wheel has none, and its version says it all."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return GitState(f"no checkout, kivi-mlx {packages()['kivi-mlx']}", dirty=False)
    try:
        sha = _git(root, "rev-parse", "HEAD")
        return GitState(sha, dirty=bool(_git(root, "status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return GitState("unknown: git does not answer", dirty=True)


def _git(root: Path, *arguments: str) -> str:
    # Without optional locks: a process that is killed while it looks leaves no .git/index.lock behind.
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()  # noqa: S603
