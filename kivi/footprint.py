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
from kivi.cache.single import KIVICache
from kivi.cache.storage import code_capacity
from kivi.spec import CacheSpec

PREFILL_STEP = 2048  # mlx-lm's prefill_step_size


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
        """Return that of arrays ``[B, H, S, D]``."""
        return cls(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, values.dtype)

    @classmethod
    def held(cls, cache: Any) -> KeyValues | None:
        """Return what came to a cache; None where no keys and values did, or it cannot tell."""
        if isinstance(cache, KIVICache):
            return None if cache.empty() else cls.of(*cache.newest())
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if isinstance(cache, QuantizedKVCache) and keys is not None and values is not None:
            key_dim, value_dim = (side[0].shape[-1] * 32 // int(cache.bits) for side in (keys, values))
            return cls(keys[0].shape[1], key_dim, value_dim, keys[1].dtype, values[1].dtype)
        return cls.of(keys, values) if isinstance(keys, mx.array) and isinstance(values, mx.array) else None

    @property
    def token(self) -> Token:
        """A token of one head."""
        return Token(self.key_dim, self.value_dim, self.key_dtype.size, self.value_dtype.size)

    @property
    def numbers(self) -> int:
        """Numbers of a token over all heads."""
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def size(self) -> int:
        """Bytes of a token over all heads, unquantised."""
        return self.heads * self.token.size


def prefill_calls(tokens: int) -> list[int]:
    """Return the calls in which ``mlx_lm.generate`` feeds a prompt: the last token comes alone."""
    whole, rest = divmod(tokens - 1, PREFILL_STEP)
    return [*[PREFILL_STEP] * whole, *[rest] * bool(rest), 1]


def layer_bytes(cache: Any, given: KeyValues | None, calls: Sequence[int], batch: int) -> int:
    """Return the resident bytes that a layer's cache will have.

    Args:
        cache: One of its kind. What it holds does not matter, but for a recurrent state, which does not grow.
        given: What comes to it; None where no keys and values do.
        calls: Tokens of each call, at least 1.
        batch: Sequences of equal length.

    Raises:
        FootprintError: it is no KIVI cache, ``KVCache``, ``QuantizedKVCache``, ``RotatingKVCache`` or ``ArraysCache``.
    """
    if isinstance(cache, ArraysCache):
        return 0 if cache.empty() else int(cache.nbytes) // int(cache.batch_size) * batch
    if not isinstance(cache, KIVICache | KVCache | QuantizedKVCache | RotatingKVCache):
        raise FootprintError(f"its bytes cannot be told beforehand: {type(cache).__name__}")
    if given is None:
        return 0
    if isinstance(cache, KIVICache):
        return batch * given.heads * _packed(cache.spec, given.token, calls)
    if isinstance(cache, QuantizedKVCache):
        return batch * given.heads * _quantized(cache, given) * _grown(calls)
    if isinstance(cache, RotatingKVCache):
        return batch * given.size * _rotated(int(cache.max_size), calls)
    return batch * given.size * _grown(calls)


def _packed(spec: CacheSpec, token: Token, calls: Sequence[int]) -> int:
    """Return the bytes of one head of one sequence."""
    capacity = 0
    for offset, end in pairwise(accumulate(calls, initial=0)):
        # The group of a call's first token is quantised in the call, those of the others when the next call comes.
        for tokens in (offset + 1, end):
            if (quantized := spec.quantized_tokens(tokens)) > capacity:
                capacity = code_capacity(quantized, capacity)
    total = sum(calls)
    newest = total - min(total, spec.sink_length) - spec.quantized_tokens(total)
    exact = spec.sink_length + max(spec.residual_length + spec.group_size, newest)
    return packed_bytes(spec.codecs, token, rows=1, quantized=capacity, exact=exact, resident=0).accounted


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
