"""Bytes of a cache before there is one: exactly those of the arrays that it will hold, from counts and shapes alone.

Each figure follows the code that allocates: :mod:`kivi.cache.storage`, and ``mlx_lm.models.cache`` for mlx-lm's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from kivi.accounting import Token, packed_bytes
from kivi.cache.storage import code_capacity
from kivi.spec import CacheSpec


class FootprintError(ValueError):
    """A cache whose bytes cannot be told beforehand; the message is one sentence that names it."""


class KeyValues(NamedTuple):
    """What a call gives a layer's cache: keys and values of one token and one sequence."""

    heads: int
    key_dim: int
    value_dim: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> KeyValues:
        """Return that of arrays ``[1, H, S, D]``."""
        return cls(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, values.dtype)

    @property
    def token(self) -> Token:
        """A token of one head."""
        return Token(self.key_dim, self.value_dim, self.key_dtype.size, self.value_dtype.size)

    @property
    def size(self) -> int:
        """Bytes of a token over all heads, unquantised."""
        return self.heads * self.token.size


def packed_cache(spec: CacheSpec, given: KeyValues, calls: Sequence[int], batch: int) -> int:
    """Return the resident bytes of a :class:`~kivi.cache.single.KIVICache` that was given calls of so many tokens.

    Args:
        spec: What one layer has, of kind ``kivi``.
        given: What comes.
        calls: Tokens of each call, at least 1.
        batch: Sequences of equal length.
    """
    capacity = 0
    for offset, end in pairwise(accumulate(calls, initial=0)):
        # The group of a call's first token is quantised in the call, those of the others when the next call comes.
        for tokens in (offset + 1, end):
            if (quantized := spec.quantized_tokens(tokens)) > capacity:
                capacity = code_capacity(quantized, capacity)
    total = sum(calls)
    newest = total - min(total, spec.sink_length) - spec.quantized_tokens(total)
    exact = spec.sink_length + max(spec.residual_length + spec.group_size, newest)
    rows = batch * given.heads
    return packed_bytes(spec.codecs, given.token, rows=rows, quantized=capacity, exact=exact, resident=0).accounted


def own_cache(cache: Any, given: KeyValues | None, calls: Sequence[int], batch: int) -> int:
    """Return the resident bytes that one of mlx-lm's caches will have.

    Args:
        cache: The cache after a call of one sequence, evaluated or not.
        given: What came, and will come in later calls; None where no keys and values came.
        calls: Tokens of each call.
        batch: Sequences of equal length.

    Raises:
        FootprintError: it is none of ``KVCache``, ``QuantizedKVCache``, ``RotatingKVCache`` and ``ArraysCache``.
    """
    if isinstance(cache, KVCache) and given is not None:
        return batch * given.size * _grown(calls)
    if isinstance(cache, QuantizedKVCache) and given is not None:
        return batch * given.heads * _grown(calls) * _quantized(cache, given)
    if isinstance(cache, RotatingKVCache) and given is not None:
        return batch * given.size * _rotated(int(cache.max_size), calls)
    if isinstance(cache, ArraysCache):
        return batch * int(cache.nbytes)
    raise FootprintError(f"its bytes cannot be told beforehand: {type(cache).__name__}")


def _quantized(cache: QuantizedKVCache, given: KeyValues) -> int:
    """Return the bytes of a token of one head: codes, and a scale and a bias a group in the dtype of the keys."""
    dims = given.key_dim + given.value_dim
    return dims * int(cache.bits) // 8 + dims // int(cache.group_size) * 2 * given.key_dtype.size


def _grown(calls: Sequence[int]) -> int:
    """Return the tokens of capacity of ``KVCache`` and ``QuantizedKVCache``, which grow by whole steps."""
    offset = capacity = 0
    for tokens in calls:
        if offset + tokens > capacity:
            kept = offset if offset % KVCache.step else capacity
            capacity = kept + -(-tokens // KVCache.step) * KVCache.step
        offset += tokens
    return capacity


def _rotated(window: int, calls: Sequence[int]) -> int:
    """Return the tokens of capacity of ``RotatingKVCache``: single tokens go round, longer calls are joined on."""
    offset = capacity = 0
    for tokens in calls:
        if tokens > 1:
            capacity = min(offset, capacity, window - 1) + tokens
        elif capacity <= offset and capacity < window:
            capacity += min(RotatingKVCache.step, window - offset)
        else:
            capacity = min(capacity, window)
        offset += tokens
    return capacity
