"""Run a command that does not outlive its owner.

A watcher, forked off, reads pipes whose other ends close when processes end, however they end, on Linux and macOS alike: the
command's own, and the owner's, whose descriptor is given. Then it ends the command's process group, children included. The
command becomes this process, and has to be started in a session of its own; the group of another's session is left alone.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ASKED_S, KILLED_S = 1.0, 2.0  # how long the group has to end when it is asked, and when it is killed
POLL_S = 0.05


def guarded(command: Sequence[str], *, owner: int | None = None, remove: Path | None = None) -> list[str]:
    """Return the command line that runs ``command`` so that it does not outlive its owner.

    Args:
        command: What to run, with a path as its first word. It is guarded where the line is started in a session of its own.
        owner: Descriptor of the end to be read of a pipe that the owner holds; without it the command itself is its children's.
        remove: Folder to remove when all has ended.
    """
    options = [*(["--owner", str(owner)] if owner is not None else []), *(["--remove", str(remove)] if remove else [])]
    return [sys.executable, "-I", "-S", __file__, *options, *command]


def main() -> None:
    """Fork the watcher and become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--owner", type=int)
    parser.add_argument("--remove")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    group = os.getpid()
    if os.getpgrp() == group:
        ended, held = os.pipe()
        if os.fork() == 0:
            os.close(held)
            watch(group, [end for end in (ended, given.owner) if end is not None], given.remove)
            return
        os.close(ended)
        os.set_inheritable(held, True)  # by the command; its own children close it
    if given.owner is not None:
        os.close(given.owner)
    os.execv(given.command[0], given.command)  # noqa: S606  ours


def watch(group: int, pipes: list[int], folder: str | None) -> None:
    """Wait until one of the pipes has no writer any more, then end the group and remove the folder."""
    os.setsid()
    select.select(pipes, [], [])
    asked: tuple[tuple[int, float], ...] = ((signal.SIGTERM, ASKED_S), (signal.SIGKILL, KILLED_S))
    for sent, seconds in asked:
        until = time.monotonic() + seconds
        while alive(group, sent) and time.monotonic() < until:
            sent = 0
            time.sleep(POLL_S)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def alive(group: int, sent: int) -> bool:
    """Send a signal, 0 for none, to a process group; return whether there is one."""
    try:
        os.killpg(group, sent)
    except OSError:  # nobody, or zombies alone
        return False
    return True


if __name__ == "__main__":
    main()
