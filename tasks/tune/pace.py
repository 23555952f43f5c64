"""How long a tuning has left: what is done has a time, and what is not takes as long as its like."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[int, int, float], None]


class Pace:
    """Counts measurements of several kinds and tells what is left.

    Args:
        tell: Called after each measurement with those done, those there are, and the seconds left.
        **counts: How many measurements each kind has.
    """

    def __init__(self, tell: Tell, **counts: int) -> None:
        self._tell = tell
        self._counts = counts
        self._seconds: dict[str, list[float]] = {kind: [] for kind in counts}
        self._like: dict[str, tuple[str, float]] = {}

    def expect(self, kind: str, *, like: str, times: float) -> None:
        """As long as no measurement of ``kind`` was made, take it for ``times`` as long as one of ``like``."""
        self._like[kind] = like, times

    def more(self, kind: str, number: int) -> None:
        """Say that ``number`` measurements of ``kind`` are to come, and no others."""
        self._counts[kind] = len(self._seconds[kind]) + number

    def done(self, kind: str, seconds: float) -> None:
        """One more is done; 0 seconds where it was found."""
        self._seconds[kind].append(seconds)
        self._tell(sum(map(len, self._seconds.values())), sum(self._counts.values()), self.left)

    @property
    def left(self) -> float:
        """Seconds left, about."""
        return sum(self._each(kind) * max(0, count - len(self._seconds[kind])) for kind, count in self._counts.items())

    def _each(self, kind: str) -> float:
        made = [seconds for seconds in self._seconds[kind] if seconds]
        if made:
            return sum(made) / len(made)
        like, times = self._like.get(kind, ("", 0.0))
        return times * self._each(like) if like else 0.0
