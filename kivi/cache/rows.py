"""Where a batch keeps its tokens: rows of different lengths side by side.

All lengths are Python integers, so that no step waits for an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from kivi.cache.storage import Store, code_capacity, write
from kivi.codec import Codecs, Packed
from kivi.quantize import dtype_name


class RowStore(Store):
    """Arrays that grow along a token axis, each row filled from its first column to a length of its own.

    Args:
        axes: The token axis, -1 or -2, of each array.
        lengths: Maps a number of tokens to what they take along the axis of each array.
        capacity: Maps the longest row, and the capacity that is too small for it, to the tokens that are allocated.
        rows: Rows of the batch.
    """

    def __init__(
        self,
        axes: Sequence[int],
        lengths: Callable[[int], Sequence[int]],
        capacity: Callable[[int, int], int],
        rows: int,
    ) -> None:
        self.axes = axes
        self.lengths = lengths
        self.capacity_for = capacity
        self.counts = [0] * rows
        self.arrays: list[mx.array] = []  # empty while no row has a token

    @property
    def capacity(self) -> int:
        """Tokens a row that fit without growing."""
        return self.arrays[-1].shape[self.axes[-1]] if self.arrays else 0

    @property
    def slots(self) -> list[mx.array | None]:
        """The arrays, or a None for each while no row has a token."""
        return list(self.arrays) or [None] * len(self.axes)

    def restore(self, counts: list[int], slots: Sequence[mx.array | None]) -> None:
        """Take over tokens of each row and :attr:`slots`, as they were saved."""
        self.counts, self.arrays = counts, [array for array in slots if array is not None]

    def append(self, rows: Sequence[int], parts: Sequence[mx.array]) -> None:
        """Add tokens to ``rows``, which are equally long; ``parts`` have ``len(rows)`` rows."""
        start = self.counts[rows[0]]
        stop = start + parts[-1].shape[self.axes[-1]]
        if stop > self.capacity:
            self._reallocate(self.capacity_for(stop, self.capacity), parts)
        spans = zip(self.arrays, self.axes, self.lengths(start), self.lengths(stop), parts, strict=True)
        for array, axis, low, high, part in spans:
            if len(rows) == len(self.counts):
                write(array, axis, low, part)
            else:  # one slice a row is written in place, where an index of rows would copy the array
                for index, row in enumerate(rows):
                    array[(slice(row, row + 1), *_columns(axis, low, high))] = part[index : index + 1]
        for row in rows:
            self.counts[row] = stop

    def row(self, row: int) -> list[mx.array]:
        """Return the tokens of one row, ``[1, ...]``, as views for immediate use; nothing if it has none."""
        if not self.counts[row]:
            return []
        stops = self.lengths(self.counts[row])
        spans = zip(self.arrays, self.axes, stops, strict=True)
        return [array[(slice(row, row + 1), *_columns(axis, 0, stop))] for array, axis, stop in spans]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows`` in this order, and no more capacity than they need."""
        self.counts = [self.counts[row] for row in rows]
        self.arrays = [array[mx.array(list(rows))] for array in self.arrays]
        self._reallocate(self.capacity_for(max(self.counts), 0), self.arrays)

    def extend(self, others: Sequence[RowStore]) -> None:
        """Add the rows of ``others`` after one's own; the others are used up."""
        stores = [self, *others]
        counts = [count for store in stores for count in store.counts]
        like = next((store.arrays for store in stores if store.arrays), [])
        capacity = self.capacity_for(max(counts), 0)
        for store in stores:
            store._reallocate(capacity, like)
        self.arrays = [mx.concatenate(list(arrays)) for arrays in zip(*(store.arrays for store in stores), strict=True)]
        self.counts = counts

    def _reallocate(self, capacity: int, like: Sequence[mx.array]) -> None:
        """Move the tokens into arrays of ``capacity``, with heads, channels and dtypes of ``like``."""
        if capacity == self.capacity:
            return
        old, self.arrays = self.arrays, []
        if capacity == 0:
            return
        used = self.lengths(min(capacity, max(self.counts)))
        for index, (axis, room) in enumerate(zip(self.axes, self.lengths(capacity), strict=True)):
            shape = [len(self.counts), *like[index].shape[1:]]
            shape[axis] = room
            new = mx.zeros(shape, like[index].dtype)
            if old and used[index]:
                write(new, axis, 0, old[index][_columns(axis, 0, used[index])])
            self.arrays.append(new)


class SinkRows(RowStore):
    """Exact keys and values of the first ``sink_length`` tokens: a row has all of them or, while they fill up, none."""

    def __init__(self, sink_length: int, rows: int) -> None:
        super().__init__((-2, -2), lambda tokens: (tokens, tokens), lambda tokens, _: sink_length if tokens else 0, rows)

    @property
    def keys(self) -> mx.array | None:
        """Keys with their spare capacity; None while no row has a sink."""
        return self.slots[0]

    @property
    def values(self) -> mx.array | None:
        """Values with their spare capacity; None while no row has a sink."""
        return self.slots[1]


class CodeRows(RowStore):
    """Packed codes: words, scales and zeros of keys, then of values."""

    def __init__(self, codecs: Codecs, rows: int) -> None:
        super().__init__(codecs.growing_axes, codecs.lengths, code_capacity, rows)

    @property
    def keys(self) -> Packed | None:
        """Packed keys with their spare capacity; None while nothing is quantised."""
        return Packed(*self.arrays[:3]) if self.arrays else None

    @property
    def values(self) -> Packed | None:
        """Packed values with their spare capacity; None while nothing is quantised."""
        return Packed(*self.arrays[3:]) if self.arrays else None


class RowWindow(Store):
    """The newest tokens of each row in full precision, aligned to the right.

    Keys ``[B, H, columns, D_k]`` and values ``[B, H, columns, D_v]``. The newest token of every row is in column
    ``stop - 1``, so a step writes one column for all rows; row ``b`` begins in column ``starts[b]``, and what lies before holds
    nothing.

    Args:
        rows: Rows of the batch.
        slack: Columns that are allocated beyond what is needed, so that making room is rare.
    """

    def __init__(self, rows: int, slack: int) -> None:
        self.slack = slack
        self.starts = [0] * rows
        self.stop = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def capacity(self) -> int:
        """Columns that are allocated."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def count(self, row: int) -> int:
        """Return the tokens of a row."""
        return self.stop - self.starts[row]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.stop - min(self.starts)

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the columns ``[B, H, S, D]`` of a call to every row."""
        added = keys.shape[-2]
        if self.keys is None or self.values is None:
            self.keys, self.values = (_zeros(part, added + self.slack) for part in (keys, values))
        elif self.stop + added > self.capacity:
            self.make_room(added)
        self.keys[..., self.stop : self.stop + added, :] = keys
        self.values[..., self.stop : self.stop + added, :] = values
        self.stop += added

    def read(self, rows: Sequence[int], start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Return columns ``start`` to ``stop`` of ``rows``, as views for immediate use."""
        keys, values = self.live()
        if len(rows) < len(self.starts):
            keys, values = (part[mx.array(list(rows))] for part in (keys, values))
        return keys[..., start:stop, :], values[..., start:stop, :]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values with their spare capacity.

        Raises:
            ValueError: no token was ever stored.
        """
        if self.keys is None or self.values is None:
            raise ValueError("this batch holds no token yet")
        return self.keys, self.values

    def live(self) -> tuple[mx.array, mx.array]:
        """Return the columns up to ``stop``, as views for immediate use."""
        keys, values = self.buffers()
        return keys[..., : self.stop, :], values[..., : self.stop, :]

    def shift(self, padding: Sequence[int]) -> None:
        """Move row ``b`` right by ``padding[b]`` columns, over the padding that its call ended with."""
        if self.keys is None or self.values is None:
            return
        columns = mx.arange(self.capacity) - mx.array(list(padding))[:, None]
        columns = mx.maximum(columns, 0)[:, None, :, None]
        self.keys = mx.take_along_axis(self.keys, columns, axis=-2)
        self.values = mx.take_along_axis(self.values, columns, axis=-2)
        self.starts = [start + width for start, width in zip(self.starts, padding, strict=True)]

    def make_room(self, added: int) -> None:
        """Reallocate for ``added`` more columns, without the columns that no row uses any more."""
        if self.keys is None or self.values is None:
            return
        first, longest = min(self.starts), self.longest
        keys, values = self.live()
        self.keys, self.values = (_zeros(part, longest + added + self.slack) for part in (keys, values))
        self.keys[..., :longest, :] = keys[..., first:, :]
        self.values[..., :longest, :] = values[..., first:, :]
        self.starts = [start - first for start in self.starts]
        self.stop = longest

    def keep(self, rows: Sequence[int]) -> None:
        """Keep ``rows`` in this order."""
        self.starts = [self.starts[row] for row in rows]
        if self.keys is not None and self.values is not None:
            kept = mx.array(list(rows))
            self.keys, self.values = self.keys[kept], self.values[kept]
            self.make_room(0)

    def require_alike(self, others: Sequence[RowWindow]) -> None:
        """Refuse to be joined with windows of another model.

        Raises:
            ValueError: heads, their sizes or dtypes differ.
        """
        held = [window.buffers() for window in (self, *others) if window.keys is not None]
        for pair in held[1:]:
            for ours, theirs in zip(held[0], pair, strict=True):
                if (ours.shape[1], ours.shape[3], ours.dtype) != (theirs.shape[1], theirs.shape[3], theirs.dtype):
                    raise ValueError(f"{_heads(theirs)} cannot join a batch of {_heads(ours)}: they are of another model")

    def extend(self, others: Sequence[RowWindow]) -> None:
        """Add the rows of ``others`` after one's own."""
        windows = [self, *others]
        columns = max(window.longest for window in windows)
        starts = [columns - window.count(row) for window in windows for row in range(len(window.starts))]
        like = next((window.live() for window in windows if window.keys is not None), None)
        if like is not None:
            aligned = [window._aligned(columns, like) for window in windows]
            keys, values = (mx.concatenate(list(parts)) for parts in zip(*aligned, strict=True))
            self.keys, self.values = (_zeros(part, columns + self.slack) for part in (keys, values))
            self.keys[..., :columns, :] = keys
            self.values[..., :columns, :] = values
        self.starts, self.stop = starts, columns

    def _aligned(self, columns: int, like: Sequence[mx.array]) -> list[mx.array]:
        """Return the newest ``columns`` columns, with empty ones before them where there are fewer."""
        parts = []
        for part, other in zip((self.keys, self.values), like, strict=True):
            aligned = mx.zeros((len(self.starts), other.shape[1], columns, other.shape[-1]), other.dtype)
            taken = min(columns, self.stop)
            if part is not None and taken:
                aligned[..., columns - taken :, :] = part[..., self.stop - taken : self.stop, :]
            parts.append(aligned)
        return parts


def _heads(array: mx.array) -> str:
    return f"{array.shape[1]} heads of {array.shape[3]} numbers in {dtype_name(array.dtype)}"


def _columns(axis: int, start: int, stop: int) -> tuple[object, ...]:
    return (Ellipsis, slice(start, stop)) if axis == -1 else (Ellipsis, slice(start, stop), slice(None))


def _zeros(like: mx.array, columns: int) -> mx.array:
    return mx.zeros((*like.shape[:-2], columns, like.shape[-1]), like.dtype)
