"""One accelerator, one measurement at a time: a lock on the host that dies with its process.

The lock is an open file's (``flock``), so the kernel frees it when its holder ends, however it ends: nothing has to time out
and no server has to be up. A note beside it says who holds it, for those who wait.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from kivi.files import write_whole
from kivi.models.embedded import cache_dir

POLL_S = 0.05  # how long the accelerator idles between two cells of different processes, at most
REMIND_S = 60.0


@contextmanager
def accelerator(label: str, *, log: Callable[[str], None], folder: Path | None = None) -> Iterator[float]:
    """Hold this host's accelerator, after waiting for whoever has it.

    Args:
        label: What is going to be measured, for those who wait.
        log: Told once at the start why this waits, then every minute, and how long it took.
        folder: Where the lock lies; the project's cache folder by default.

    Yields:
        The seconds spent waiting.
    """
    folder = folder or cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "accelerator.lock", thread_local=False)
    note = folder / "accelerator.json"
    waited = _acquire(lock, note, label, log)
    try:
        _leave(note, label)
        yield waited
    finally:
        lock.release()


def _acquire(lock: FileLock, note: Path, label: str, log: Callable[[str], None]) -> float:
    started = time.monotonic()
    try:
        lock.acquire(blocking=False)
        return 0.0
    except Timeout:
        log(f"{label}: waits for the accelerator, {_holder(note)}")
    while True:
        try:
            lock.acquire(timeout=REMIND_S, poll_interval=POLL_S)
            break
        except Timeout:
            log(f"{label}: still waits for the accelerator after {time.monotonic() - started:.0f} s, {_holder(note)}")
    waited = time.monotonic() - started
    log(f"{label}: has the accelerator after waiting {waited:.1f} s")
    return waited


def _leave(note: Path, label: str) -> None:
    content = {"process": os.getpid(), "label": label, "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")}
    write_whole(note, json.dumps(content))


def _holder(note: Path) -> str:
    """Describe the holder, as far as the note tells: between locking and noting there is a moment."""
    try:
        held = json.loads(note.read_text(encoding="utf-8"))
        return f"which process {held['process']} has for {held['label']} since {held['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "which another process has"
