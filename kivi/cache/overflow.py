"""Whether scales and zeros hold what their groups hold: a cache that cannot keep its numbers refuses them.

float16 ends at 65,504. A group beyond it, or with a wider range than its levels span, gets infinity for its zero or scale
(:mod:`kivi.quantize`), and what is restored from it is infinite or NaN. Each flush computes a flag of that along with its
codes. The flag of a decode step is looked at two calls later: mlx-lm builds a step while the one before runs, so that what
was computed before those two is there, and no step waits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kivi.backends import Backend
from kivi.cache.storage import Store
from kivi.codec import Codec, Codecs, Packed
from kivi.quantize import dtype_name
from kivi.spec import CacheSpec


class NonFiniteError(ValueError):
    """NaN or infinity in a cache, or numbers that its scales and zeros cannot hold; the message names where."""


class Quantized(NamedTuple):
    """Codes of a flush, and whether a number restored from them is NaN or infinity: bool ``[]``, evaluated with the codes."""

    keys: Packed
    values: Packed
    unheld: mx.array


def quantize(backend: Backend, codecs: Codecs, keys: mx.array, values: mx.array) -> Quantized:
    """Quantise keys ``[B, H, S, D_k]`` and values ``[B, H, S, D_v]`` of whole groups of tokens."""
    packed_keys, packed_values = backend.quantize(keys, codecs.keys), backend.quantize(values, codecs.values)
    unheld = any_unheld(codecs, packed_keys, packed_values, (keys.dtype, values.dtype))
    (scale,) = mx.depends([packed_keys.scale], [unheld])  # whatever evaluates the codes evaluates the flag too
    return Quantized(packed_keys._replace(scale=scale), packed_values, unheld)


def any_unheld(codecs: Codecs, keys: Packed, values: Packed, dtypes: tuple[mx.Dtype, mx.Dtype]) -> mx.array:
    """Return whether a number restored from codes is NaN or infinity in the ``dtypes`` of keys and values, bool ``[]``."""
    return mx.any(_unheld(keys, codecs.keys, dtypes[0])) | mx.any(_unheld(values, codecs.values, dtypes[1]))


class Flags(Store):
    """The flags of flushes that were not looked at yet, each with the calls that may go by until then."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, mx.array]] = []

    def add(self, flag: mx.array, *, calls: int) -> None:
        """Have ``flag`` looked at once ``calls`` more calls have gone by."""
        self.waiting.append((calls, flag))

    def next_call(self) -> bool:
        """Count a call, and return whether one of the flags that are due is set; what is set stays due."""
        due = [flag for calls, flag in self.waiting if calls == 0]
        mx.eval(due)
        failed = [(0, flag) for flag in due if flag.item()]
        self.waiting = failed + [(calls - 1, flag) for calls, flag in self.waiting if calls]
        return bool(failed)

    def any_set(self) -> bool:
        """Return whether any flag is set; those that are stay due, the others are done with."""
        self.waiting = [(0, flag) for _, flag in self.waiting if flag.item()]
        return bool(self.waiting)


def find_unheld(
    spec: CacheSpec, keys: Packed, values: Packed, dtypes: tuple[mx.Dtype, mx.Dtype], *, start: int, row: int = 0
) -> str | None:
    """Return what is wrong with the first group that cannot be restored, and what to do; None if there is none.

    Args:
        spec: The cache's.
        keys: Codes without spare capacity.
        values: Codes of the same tokens.
        dtypes: What keys and values are restored to.
        start: Position of the first token.
        row: Index of the first row.
    """
    codecs = spec.codecs
    sides = (("key", keys, codecs.keys, dtypes[0]), ("value", values, codecs.values, dtypes[1]))
    for name, packed, codec, dtype in sides:
        # The definition gives a scale of NaN to a group that holds NaN or infinity, and to no other.
        if (group := _first(mx.isnan(packed.scale), name)) is not None:
            what = "key group" if name == "key" else "value"
            token = start + group.tokens(name, spec)[0]
            return not_finite(what, token, codec, dtype)
    for name, packed, codec, dtype in sides:
        if (group := _first(_unheld(packed, codec, dtype), name)) is not None:
            scale, zero = (np.array(part)[group.at(name)].item() for part in (packed.scale, packed.zero))
            (first, last), (low, high) = group.tokens(name, spec), group.channels(name, spec)
            where = (
                f"row {row + group.row}, head {group.head}, {_span('channel', low, high)}, "
                f"{_span('token', start + first, start + last)}"
            )
            rotated = "rotated " if codec.rotated else ""
            return f"the {rotated}{name}s of {where} {_excess(spec, scale, zero, codec.levels, dtype)}"
    return None


def not_finite(what: str, token: int, codec: Codec, dtype: mx.Dtype) -> str:
    """Return a sentence about NaN or infinity in what a cache stores: where, and what to look at."""
    found = f"NaN or infinity in the {what} at token {token}; look at the model's weights and dtype"
    if not (codec.rotated and dtype == mx.float16):
        return found
    return f"{found}, or use rotate=none: a vector longer than 65,504 may leave float16 when it is rotated"


def in_layer(layer: int | None, found: str) -> str:
    """Return a sentence that begins with the layer, where it is known."""
    return found if layer is None else f"layer {layer}: {found}"


class _Group(NamedTuple):
    """Indices of a group: of tokens or groups of them, row, head, and of channels or groups of them."""

    place: int
    row: int
    head: int
    channel: int

    def at(self, name: str) -> tuple[int, ...]:
        last = (self.channel, self.place) if name == "key" else (self.place, self.channel)
        return (self.row, self.head, *last)

    def tokens(self, name: str, spec: CacheSpec) -> tuple[int, int]:
        return _members(self.place, spec.group_size if name == "key" else 1)

    def channels(self, name: str, spec: CacheSpec) -> tuple[int, int]:
        return _members(self.channel, 1 if name == "key" else spec.group_size)


def _members(index: int, size: int) -> tuple[int, int]:
    return index * size, index * size + size - 1


def _unheld(packed: Packed, codec: Codec, dtype: mx.Dtype) -> mx.array:
    """Return of which groups a restored number is not finite in ``dtype``: their largest is, or their zero."""
    largest = packed.scale.astype(mx.float32) * codec.levels + packed.zero.astype(mx.float32)
    return ~mx.isfinite(largest.astype(dtype))


def _first(flags: mx.array, name: str) -> _Group | None:
    """Return the group of the oldest token that is flagged in the shape of a scale."""
    ordered = flags.transpose(3, 0, 1, 2) if name == "key" else flags.transpose(2, 0, 1, 3)
    if not mx.any(ordered).item():
        return None
    return _Group(*(int(index) for index in np.argwhere(np.array(ordered))[0]))


def _span(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _excess(spec: CacheSpec, scale: float, zero: float, levels: int, dtype: mx.Dtype) -> str:
    """Return by what a group of finite numbers is more than its parameters hold, and the remedy."""
    limit = float(mx.finfo(spec.params).max)
    if math.isinf(zero):
        reach = f"go below {-limit:,.7g}" if zero < 0 else f"are above {limit:,.7g}"
    elif math.isinf(scale):
        reach = f"range over more than {levels * limit:,.7g}"
    else:
        reach = f"would be restored as up to {scale * levels + zero:,.7g}, beyond {dtype_name(dtype)}"
    if spec.param_dtype == "float16":
        return f"{reach}: float16 scales and zeros do not hold them; use param_dtype=float32 (params=float32 in a spec's text)"
    return f"{reach}: {spec.param_dtype} scales and zeros do not hold them; use kind full"
