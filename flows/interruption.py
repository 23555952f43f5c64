"""Ctrl-C and SIGTERM end a command within seconds, whatever code they meet: one sentence, then exit code 130 or 143.

Python's own handlers wait for the main thread, and Prefect puts others in their place. So a thread hears of the signal from
Python's wakeup descriptor. It says the sentence, silences what others would say, and ends the process ``GRACE_S`` later; the
main thread, in which the signal also raises ``KeyboardInterrupt``, has that long to unwind.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

GRACE_S = 1.0
SCREEN_S = 0.3
SENTENCE = b"kivi: interrupted; what is finished is kept, and the same command goes on from there\n"
SHOWN_CURSOR = b"\r\x1b[K\x1b[?25h"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ASKED = 0  # no signal's number


class Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds as Ctrl-C does."""


class _Ear:
    """Hears of the first signal, and answers whether there was one."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._answered = threading.Event()
        self.said = threading.Event()
        self._due: float | None = None
        self.signal = 0
        self.screens: list[Callable[[], object]] = []
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def heard(self) -> int:
        """Return the signal that has arrived, 0 for none; when there was one, its sentence has been said."""
        self._answered.clear()
        os.write(self._write, bytes([ASKED]))  # read after the signals that came before
        self._answered.wait(GRACE_S)
        return self.signal

    def _listen(self) -> None:
        while True:
            left = None if self._due is None else max(0.0, self._due - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                _end(self.signal)
            number = os.read(self._read, 1)[0]
            if number == ASKED:
                self._answered.set()
            elif number in SIGNALS and not self.signal:
                self._due = time.monotonic() + GRACE_S
                self.signal = number
                self._say()
                self.said.set()

    def _say(self) -> None:
        with suppress(OSError):  # nobody reads
            cleared = all(_in_time(clear) for clear in self.screens)
            terminal = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(terminal, (b"" if cleared or not os.isatty(terminal) else SHOWN_CURSOR) + SENTENCE)


_ear: _Ear | None = None
_raised = False


def listen() -> None:
    """Have signals end this process from now on. One that is ignored, as in the background of a shell, stays so."""
    global _ear
    _ear = _Ear()
    atexit.register(settle)  # the first to be registered is the last to be called
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    unraisable = sys.unraisablehook
    sys.unraisablehook = lambda args: None if heard() else unraisable(args)  # what the signal found half built says nothing


def heard() -> bool:
    """Return whether a signal has arrived, and so what goes wrong now is its doing."""
    return _ear is not None and bool(_ear.heard())


def settle() -> None:
    """End the process if a signal has arrived."""
    if _ear is not None and (number := _ear.heard()):
        _end(number)


@contextmanager
def clearing(screen: Callable[[], object]) -> Iterator[None]:
    """Have ``screen`` called before the sentence is said, from another thread, to remove what moves on the terminal."""
    screens = [] if _ear is None else _ear.screens
    screens.append(screen)
    try:
        yield
    finally:
        screens.remove(screen)


@contextmanager
def left_to_the_block() -> Iterator[None]:
    """Have signals raise ``KeyboardInterrupt`` and nothing else, for what knows itself how it ends."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        if handler is _interrupt:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise in the main thread once the sentence has been said, so that nothing comes before it."""
    if _ear is not None:
        _ear.said.wait(GRACE_S)
    _raise(number, frame)


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  as Python calls it
    global _raised
    if not _raised:  # a second one would break off the unwinding
        _raised = True
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _in_time(call: Callable[[], Any]) -> bool:
    """Return whether ``call`` ended soon; it may wait for a lock that nobody gives back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SCREEN_S)
    return not thread.is_alive()


def _end(number: int) -> NoReturn:
    os._exit(128 + number)
