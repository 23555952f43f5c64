"""What a running flow tells whoever started it in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tasks.run.night import Outcome
from tasks.run.plan import Plan


class Listener:
    """Is told of a night's progress; this one, that of flows which a worker runs, does nothing.

    Called from the measuring thread, several times a second: do little.
    """

    def planned(self, plan: Plan) -> None:
        """The cells are known."""

    def due(self, done: int, total: int, seconds: float) -> None:
        """A tuning has so many of its measurements, and is going to take about so many seconds more."""

    def step(self, label: str, stage: str, done: int, total: int) -> None:
        """The running cell has done a pass."""

    def finished(self, outcome: Outcome) -> None:
        """A cell has its result, or failed."""


_listener: ContextVar[Listener] = ContextVar("listener", default=Listener())  # noqa: B039  it holds no state


def listener() -> Listener:
    """Return who listens in this context."""
    return _listener.get()


@contextmanager
def listening(who: Listener) -> Iterator[None]:
    """Have ``who`` told of the flows that run in this context."""
    token = _listener.set(who)
    try:
        yield
    finally:
        _listener.reset(token)
