"""Where a cache keeps its tokens: codes of the quantised ones, exact copies of the others.

Both stores hold tokens oldest first along one axis, with spare capacity at its end, and keep nothing but arrays that own
their buffers: what is kept is always written into an array made here, never a view of somebody else's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from kivi.accounting import resident_bytes
from kivi.codec import Codecs, Packed
from kivi.quantize import dtype_name, padded_length

CODE_STEP = 256  # tokens: capacity of codes is a multiple, so of every group size; mlx-lm's KVCache grows by as much
EXACT_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
GROWTH = 32  # capacity grows by at least a 32nd: a code is copied about 32 times in its life, and spare stays small


def require_fitting(keys: mx.array, values: mx.array, held: Sequence[mx.array | None]) -> None:
    """Refuse what MLX would broadcast or cast into a store without a word.

    Args:
        keys: What is to be added.
        values: What is to be added.
        held: Keys and values ``[B, H, capacity, D]`` that are there, or None.

    Raises:
        ValueError: keys and values are not float32, float16 or bfloat16 ``[B, H, S, D]`` of the same tokens, or not of the
            rows, heads, sizes and dtypes that are there.
    """
    for name, array, there in zip(("keys", "values"), (keys, values), held, strict=True):
        if there is not None and _alike(array, there):
            continue
        if array.ndim != 4 or array.dtype not in EXACT_DTYPES:
            raise ValueError(
                f"{name} {array.shape} in {dtype_name(array.dtype)}: expected [B, H, S, D] in a float of 16 or 32 bits"
            )
        if there is not None:
            raise ValueError(
                f"{name} {array.shape} in {dtype_name(array.dtype)}: the cache holds {there.shape[:2]} rows and heads of "
                f"{there.shape[3]} numbers in {dtype_name(there.dtype)}"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"keys {keys.shape}, values {values.shape}: expected the same rows, heads and tokens")


def _alike(array: mx.array, there: mx.array) -> bool:
    """Return whether ``array`` is of as many axes and of the sizes and dtype of ``there``, tokens apart."""
    shape, held = array.shape, there.shape
    return shape[:2] == held[:2] and shape[3:] == held[3:] and array.dtype == there.dtype


def code_capacity(tokens: int, full: int = 0) -> int:
    """Return the tokens of capacity that ``tokens`` get when a capacity of ``full`` is too small for them.

    What comes at once, as a prompt does, gets no more than the next step; what comes bit by bit grows geometrically. Either
    way it is less than ``tokens / 32 + CODE_STEP`` more than the tokens need.
    """
    return padded_length(max(tokens, full + full // GROWTH), CODE_STEP)


def enlarged(array: mx.array, axis: int, used: int, capacity: int) -> mx.array:
    """Return a new array of ``capacity`` along ``axis`` that begins with the first ``used`` elements of ``array``."""
    shape = list(array.shape)
    shape[axis] = capacity
    new = mx.zeros(shape, array.dtype)
    write(new, axis, 0, _first(array, axis, used))
    return new


def write(target: mx.array, axis: int, start: int, part: mx.array) -> None:
    """Copy ``part`` into ``target`` at ``start`` along ``axis`` (-1 or -2), in place when nobody else holds ``target``."""
    length = part.shape[axis]
    if length == target.shape[axis] > 1:
        # MLX takes a source that covers all of its target instead of copying it, and with it the buffer that it is a view of.
        write(target, axis, start, _first(part, axis, 1))
        part, start, length = mx.split(part, [1], axis=axis)[1], start + 1, length - 1
    if length == 0:
        return
    if axis == -1:
        target[..., start : start + length] = part
    else:
        target[:, :, start : start + length] = part


def _first(array: mx.array, axis: int, count: int) -> mx.array:
    return array[..., :count] if axis == -1 else array[..., :count, :]


class Store:
    """What keeps tokens of a cache, in arrays among its attributes."""

    def twin(self) -> Self:
        """Return a store of the same tokens, in the same arrays until one of the two reallocates."""
        twin = copy.copy(self)
        vars(twin).update({name: list(value) for name, value in vars(self).items() if isinstance(value, list)})
        return twin


class CodeStore(Store):
    """Packed codes of one layer's quantised tokens, in the layout of :class:`kivi.codec.Packed`.

    Keys grow along their last axis, values along the one before. ``count`` tokens are there; the capacity is less than
    ``count / 32 + CODE_STEP`` tokens more. Growing copies the codes, so that adding a token costs amortised constant time.
    """

    def __init__(self, codecs: Codecs) -> None:
        self.codecs = codecs
        self.axes = codecs.growing_axes
        self.count = 0
        self._arrays: list[mx.array] = []  # words, scale, zero of keys, then of values; empty while nothing is quantised

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return self._arrays[3].shape[-2] if self._arrays else 0

    @property
    def keys(self) -> Packed | None:
        """Packed keys with their spare capacity; None while nothing is quantised."""
        return Packed(*self._arrays[:3]) if self._arrays else None

    @property
    def values(self) -> Packed | None:
        """Packed values with their spare capacity; None while nothing is quantised."""
        return Packed(*self._arrays[3:]) if self._arrays else None

    def append(self, keys: Packed, values: Packed) -> None:
        """Add whole groups of tokens, as :meth:`kivi.backends.Backend.quantize` returns them.

        Raises:
            ValueError: the arrays are not of the same tokens.
        """
        parts = (*keys, *values)
        total = self.count + values.words.shape[-2]
        expected = self.codecs.lengths(values.words.shape[-2])
        if any(part.shape[axis] != length for part, axis, length in zip(parts, self.axes, expected, strict=True)):
            raise ValueError(
                f"codes of shapes {[part.shape for part in parts]}: they are not of the same whole groups of tokens"
            )
        if total > self.capacity:
            self._reallocate(code_capacity(total, self.capacity), self._arrays or parts)
        for array, axis, start, part in zip(self._arrays, self.axes, self.codecs.lengths(self.count), parts, strict=True):
            write(array, axis, start, part)
        self.count = total

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` tokens, a whole number of groups, and give back the room of the others."""
        if count < self.count:
            self.count = count
            self._reallocate(code_capacity(count), self._arrays)

    def slice(self, start: int, stop: int) -> tuple[Packed, Packed]:
        """Return keys and values of tokens ``start`` to ``stop``, whole groups, as views for immediate use.

        Raises:
            ValueError: nothing is quantised.
        """
        if not self._arrays:
            raise ValueError("nothing is quantised yet: wait for the first group to leave the window")
        spans = zip(self._arrays, self.axes, self.codecs.lengths(start), self.codecs.lengths(stop), strict=True)
        parts = [array[..., low:high] if axis == -1 else array[..., low:high, :] for array, axis, low, high in spans]
        return Packed(*parts[:3]), Packed(*parts[3:])

    def _reallocate(self, capacity: int, like: Sequence[mx.array]) -> None:
        """Move the tokens into new arrays of ``capacity``, with the shapes and dtypes of ``like``."""
        if capacity == 0:
            self._arrays = []
            return
        spans = zip(like, self.axes, self.codecs.lengths(self.count), self.codecs.lengths(capacity), strict=True)
        self._arrays = [enlarged(array, axis, used, room) for array, axis, used, room in spans]


class ExactStore(Store):
    """Keys ``[B, H, capacity, D_k]`` and values ``[B, H, capacity, D_v]`` of tokens in full precision.

    ``room`` tokens are allocated, or as many as are there when they are more.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.count = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add tokens ``[B, H, S, D]``; ``S`` may be 0, which allocates the room."""
        needed = self.count + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys = enlarged(keys, -2, 0, max(self.room, needed))
            self.values = enlarged(values, -2, 0, max(self.room, needed))
        elif needed > self.capacity:
            self._move(0, self.count, max(self.room, needed))
        write(self.keys, -2, self.count, keys)
        write(self.values, -2, self.count, values)
        self.count = needed

    def drop_first(self, count: int) -> None:
        """Remove the oldest ``count`` tokens."""
        self._move(count, self.count, max(self.room, self.count - count))

    def shrink(self) -> None:
        """Give back what was allocated for more tokens than ``room`` and are no longer there."""
        if self.capacity > max(self.room, self.count):
            self.drop_first(0)

    def truncate(self, count: int) -> None:
        """Keep the oldest ``count`` tokens; the others leave zeros, since attention weights them with 0 and 0 x NaN is NaN."""
        if count < self.count and self.values is not None:
            self.values[..., count : self.count, :] = 0
            self.count = count

    def live(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the tokens that are there, oldest first."""
        keys, values = self.buffers()
        return keys[..., : self.count, :], values[..., : self.count, :]

    def buffers(self) -> tuple[mx.array, mx.array]:
        """Return keys and values with their spare capacity.

        Raises:
            ValueError: no token was ever stored.
        """
        if self.keys is None or self.values is None:
            raise ValueError("no token was ever stored: call update_and_fetch first")
        return self.keys, self.values

    def _move(self, start: int, stop: int, capacity: int) -> None:
        """Keep tokens ``start`` to ``stop`` in new arrays of ``capacity``."""
        if self.keys is None or self.values is None:
            return
        self.keys = enlarged(self.keys[..., start:stop, :], -2, stop - start, capacity)
        self.values = enlarged(self.values[..., start:stop, :], -2, stop - start, capacity)
        self.count = stop - start


def live_arrays(holder: Any) -> Iterator[mx.array]:
    """Yield every MLX array that ``holder`` keeps alive: through attributes, tuples, lists and dicts, each path once.

    It looks at what is there rather than at a list of names, so that an array which bookkeeping forgot is found too.
    """
    if isinstance(holder, mx.array):
        yield holder
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from live_arrays(part)
    elif isinstance(holder, list | tuple):
        for part in holder:
            yield from live_arrays(part)
    elif isinstance(holder, Store):
        yield from live_arrays(vars(holder))


def live_bytes(holder: Any) -> int:
    """Return the bytes of :func:`live_arrays`, which are evaluated: until then what they were made of is live too."""
    arrays = list(live_arrays(holder))
    mx.eval(arrays)
    return resident_bytes(arrays)
