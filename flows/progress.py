"""What a running flow tells whoever started it in the same process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from tasks.run.night import Outcome
from tasks.run.plan import Plan


class Listener(Protocol):
    """Hears of a night's progress. Called from the measuring thread, several times a second: do little."""

    def planned(self, plan: Plan) -> None:
        """The cells are known."""

    def step(self, label: str, stage: str, done: int, total: int) -> None:
        """The running cell has done a pass."""

    def finished(self, outcome: Outcome) -> None:
        """A cell has its result, or failed."""


class Silent:
    """Hears nothing: the listener of flows that a worker runs."""

    def planned(self, plan: Plan) -> None: ...

    def step(self, label: str, stage: str, done: int, total: int) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


_listener: ContextVar[Listener] = ContextVar("listener", default=Silent())  # noqa: B039  it holds no state


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
