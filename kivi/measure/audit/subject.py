"""The cache under audit: how it is made, what its spec promises, and how it is read from outside.

A check uses mlx-lm's protocol (``update_and_fetch``, ``keys_and_values``, ``state``, ``trim``, ``offset``) and ``bytes()``, the
cache's byte accounting. It reads no private attribute, so any cache can be audited, also one that misreports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kivi.accounting import CacheBytes, Token, packed_bytes
from kivi.build import MAKERS
from kivi.cache.packed import MAX_CODE_QUERIES
from kivi.cache.storage import CODE_STEP, GROWTH
from kivi.measure.arms import settle
from kivi.spec import CacheSpec, SpecError

DTYPE = mx.float16  # what caches hold on a GPU; no check multiplies matrices, which a CPU does slowly in 16 bits


class Pair(NamedTuple):
    """Keys and values ``[B, H, S, D]`` of the same tokens."""

    keys: mx.array
    values: mx.array

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[-2])

    def cut(self, start: int, stop: int | None = None) -> Pair:
        """Return tokens ``start`` to ``stop``."""
        return Pair(self.keys[..., start:stop, :], self.values[..., start:stop, :])


@dataclass(frozen=True)
class Subject:
    """A cache under audit.

    Args:
        spec: What the caches claim to be: bits, group, residual window, sinks.
        make: Makes a new, empty cache of one sequence.
        heads: KV heads.
        head_dim: Channels of a key and of a value.
    """

    spec: CacheSpec
    make: Callable[[], Any]
    heads: int
    head_dim: int

    def tokens(self, count: int, seed: int) -> Pair:
        """Return random keys and values of ``count`` tokens."""
        shape = (1, self.heads, count, self.head_dim)
        pair = Pair(*(mx.random.normal(shape, key=key).astype(DTYPE) for key in mx.random.split(mx.random.key(seed))))
        mx.eval(pair)
        return pair

    def fed(self, tokens: Pair, calls: Iterable[int] | None = None) -> Any:
        """Return a new cache that was given ``tokens`` in ``calls`` of so many tokens each; all at once by default."""
        cache = self.make()
        feed(cache, tokens, calls)
        return cache

    @property
    def packs(self) -> bool:
        """Whether the spec promises packed codes, which take fewer bytes."""
        return self.spec.kind == "kivi"

    @property
    def filled(self) -> int:
        """Tokens after which three groups are quantised and the window holds no whole number of groups."""
        return self.spec.sink_length + self.spec.residual_length + 3 * self.spec.group_size + 5

    def frontier(self, tokens: int) -> int:
        """Return the position up to which a cache of ``tokens`` tokens that was never trimmed holds sinks or codes."""
        sinks, group_size = self.spec.sink_length, self.spec.group_size
        groups = max(0, tokens - sinks - self.spec.residual_length) // group_size
        return min(tokens, sinks) + groups * group_size

    def as_promised(self, tokens: Pair) -> Pair:
        """Return ``tokens`` as a cache must give them back: quantised by the definition up to the frontier, else exact.

        What a spec rotates is rotated and back again: in a packed cache every token, else those that are quantised.
        """
        sinks, frontier = self.spec.sink_length, self.frontier(tokens.tokens)
        stored = self.rotated(tokens)
        exact = self.rotated_back(stored) if self.packs else tokens
        if frontier <= sinks:
            return exact
        old = zip(self.spec.codecs, stored.cut(sinks, frontier), strict=True)
        rounded = self.rotated_back(Pair(*(codec.roundtrip(side) for codec, side in old)))
        parts = (exact.cut(0, sinks), rounded, exact.cut(frontier))
        return Pair(*(mx.concatenate(list(side), axis=-2) for side in zip(*parts, strict=True)))

    def rotated(self, tokens: Pair) -> Pair:
        """Return ``tokens`` in the basis that the spec quantises."""
        return Pair(*(codec.rotate(side) for codec, side in zip(self.spec.codecs, tokens, strict=True)))

    def rotated_back(self, tokens: Pair) -> Pair:
        """Return what :meth:`rotated` made ``tokens`` of."""
        return Pair(*(codec.rotate_back(side) for codec, side in zip(self.spec.codecs, tokens, strict=True)))

    def expected_bytes(self, tokens: int) -> CacheBytes:
        """Return what the cache must account for ``tokens`` tokens; resident and spare are left at 0."""
        return self.packed_bytes(tokens) if self.packs else self._count_bytes(tokens, quantized=0)

    def packed_bytes(self, tokens: int) -> CacheBytes:
        """Return what a packed cache of this spec must account for ``tokens`` tokens; resident and spare are left at 0."""
        return self._count_bytes(tokens, quantized=self.frontier(tokens) - min(tokens, self.spec.sink_length))

    def _count_bytes(self, tokens: int, *, quantized: int) -> CacheBytes:
        return packed_bytes(
            self.spec.codecs,
            Token(self.head_dim, self.head_dim, DTYPE.size, DTYPE.size),
            rows=self.heads,
            quantized=quantized,
            exact=tokens - quantized,
            resident=0,
        )

    def spare_limit(self, tokens: int) -> int:
        """Return the most bytes of spare capacity that a cache may keep, as its class states."""
        token = 2 * self.heads * self.head_dim * DTYPE.size
        if not self.packs:
            return int(KVCache.step) * token
        spec, group, dim = self.spec, self.spec.group_size, self.head_dim
        code = sum(codec.code_bytes(group, dim) + codec.param_bytes(group, dim) for codec in spec.codecs) / group
        window = spec.sink_length + spec.residual_length + spec.group_size + MAX_CODE_QUERIES
        return int((tokens / GROWTH + CODE_STEP) * self.heads * code) + window * token


def subject_of(spec: CacheSpec, *, heads: int, head_dim: int) -> Subject:
    """Return the project's own cache of ``spec`` as a subject.

    Raises:
        SpecError: its kind has no byte accounting (only ``kivi`` and ``kivi-roundtrip`` have), or layers differ.
    """
    if not spec.kind.startswith("kivi") or spec.layers:
        raise SpecError(f"{spec.slug}: only one layer's cache of kind kivi or kivi-roundtrip has byte accounting to be audited")
    return Subject(spec=spec, make=lambda: MAKERS[spec.kind](spec), heads=heads, head_dim=head_dim)


def feed(cache: Any, tokens: Pair, calls: Iterable[int] | None = None) -> None:
    """Give ``tokens`` to ``cache`` in arrays that nothing else holds, as a model would."""
    start = 0
    for count in calls if calls is not None else (tokens.tokens,):
        part = tokens.cut(start, start + count)
        fresh = [side + mx.array(0, side.dtype) for side in part]
        mx.eval(fresh)
        mx.eval(cache.update_and_fetch(*fresh))
        del fresh
        start += count


def read(cache: Any) -> Pair:
    """Return all tokens as the cache gives them back, with pending quantisation done."""
    settle([cache])
    pair = Pair(*cache.keys_and_values())
    mx.eval(pair)
    return pair


def differing(ours: Pair, theirs: Pair) -> int:
    """Return how many elements differ in any bit; all of the larger one when shapes or dtypes do."""
    return sum(_differing(a, b) for a, b in zip(ours, theirs, strict=True))


def first_difference(ours: Pair, theirs: Pair) -> int | None:
    """Return the first token at which two pairs of equal shapes differ."""
    flags = [mx.any(_bits(a) != _bits(b), axis=(0, 1, 3)) for a, b in zip(ours, theirs, strict=True) if a.shape == b.shape]
    tokens = [int(mx.argmax(flag)) for flag in flags if mx.any(flag)]
    return min(tokens, default=None)


def show_bytes(count: float) -> str:
    """Return a number of bytes in full, e.g. ``131,072 bytes``."""
    return f"{count:,.0f} bytes"


def join(sentences: Sequence[str]) -> str:
    """Return the first few sentences, and how many more there are."""
    shown = "; ".join(sentences[:3])
    return f"{shown}; and {len(sentences) - 3} more" if len(sentences) > 3 else shown


def _differing(a: mx.array, b: mx.array) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.size, b.size)
    return int(mx.sum(_bits(a) != _bits(b)))


def _bits(x: mx.array) -> mx.array:
    return mx.contiguous(x).view(mx.uint32 if x.dtype.size == 4 else mx.uint16)
