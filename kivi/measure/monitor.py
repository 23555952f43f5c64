"""Progress out of, and deadlines into, the loops that measure."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str, int, int], None]


class DeadlineError(RuntimeError):
    """A measurement that ran past its deadline."""


class Monitor:
    """Handed to each measuring loop, which calls :meth:`step` once a pass.

    A thread cannot be interrupted from outside, so the deadline is looked at from inside the loop.

    Args:
        report: Called with the stage's name, the passes done and the passes in all; nobody by default.
        deadline_s: Seconds from now at which :meth:`step` raises; none by default.
    """

    def __init__(self, report: Report | None = None, deadline_s: float | None = None) -> None:
        self._report = report
        self._limit = deadline_s
        self._started = time.monotonic()

    def step(self, stage: str, done: int, total: int) -> None:
        """Report progress.

        Raises:
            DeadlineError: the deadline has passed.
        """
        if self._report is not None:
            self._report(stage, done, total)
        self.check(f"{stage}: stopped at {done} of {total}")

    def check(self, what: str) -> None:
        """Look at the deadline alone; ``what`` begins the sentence.

        Raises:
            DeadlineError: it has passed.
        """
        elapsed = time.monotonic() - self._started
        if self._limit is not None and elapsed > self._limit:
            raise DeadlineError(f"{what} after {elapsed:.1f} s, deadline {self._limit:g} s")
