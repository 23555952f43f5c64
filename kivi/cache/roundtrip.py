"""RoundTripKIVICache: KIVI's error without KIVI's memory.

The cache quantises tokens as they leave the residual window and at once dequantises them in place, so that attention
needs no change. It shows what KIVI does to quality, and saves nothing: its live arrays are those of a full cache. What
the same tokens would weigh if they were packed is :meth:`RoundTripKIVICache.packed_bytes`, an estimate and named as one.
The cache that really is smaller is :class:`kivi.cache.single.KIVICache`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from kivi import backends
from kivi.accounting import CacheBytes, Token, packed_bytes, resident_bytes
from kivi.cache.overflow import NonFiniteError, find_unheld, in_layer, quantize
from kivi.cache.state import loadable
from kivi.spec import CacheSpec, SpecError


@loadable
class RoundTripKIVICache(mlx_lm_cache.KVCache):  # type: ignore[misc]
    """One layer's cache whose old tokens have been through KIVI's quantiser (arXiv:2402.02750, algorithm 1).

    The newest ``residual_length`` tokens and the first ``sink_length`` are exact. The tokens between are rounded in groups
    of ``group_size`` counted from the true position, once a whole group has left the window: between ``residual_length`` and
    ``residual_length + group_size - 1`` newest tokens are exact, and which tokens are rounded together does not depend on how
    the sequence was cut into calls.

    Unlike those of a packed cache, a call's tokens are stored and flushed *before* they are returned. In
    a call of more than ``residual_length + 1`` tokens an early query can thus see a key group whose minimum and maximum
    come from tokens after it. Score this cache in calls of at most ``residual_length + 1`` tokens, where that cannot happen.

    Args:
        spec: A spec of kind ``kivi-roundtrip``, without settings by layer.
    """

    def __init__(self, spec: CacheSpec) -> None:
        if CacheSpec.required(spec).kind != "kivi-roundtrip" or spec.layers:
            raise SpecError(f"{spec.slug}: RoundTripKIVICache takes the kivi-roundtrip spec of one layer")
        super().__init__()
        self.spec = spec
        self.layer: int | None = None
        self.frontier = spec.sink_length
        self._backend = backends.resolve(spec.backend)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys ``[B, H, S, D_k]`` and values ``[B, H, S, D_v]``; return all tokens, the old ones rounded.

        Raises:
            NonFiniteError: the tokens that are to be rounded are not finite, or scale and zero cannot hold them.
            RotationError: they have a number of channels that cannot be rotated as the spec wants.
        """
        if self.empty():
            for array, codec in zip((keys, values), self.spec.codecs, strict=True):
                codec.require_channels(array.shape[-1])
        super().update_and_fetch(keys, values)
        frontier = self.spec.sink_length + self.spec.quantized_tokens(self.offset)
        if frontier > self.frontier:
            self._roundtrip(self.frontier, frontier)
            self.frontier = frontier
        fetched: tuple[mx.array, mx.array] = self.keys_and_values()
        return fetched

    def _roundtrip(self, start: int, stop: int) -> None:
        codecs = self.spec.codecs
        sides = zip((self.keys, self.values), codecs, strict=True)
        exact = [codec.rotate(array[..., start:stop, :]) for array, codec in sides]
        rounded = [self._backend.group_roundtrip(part, codec) for part, codec in zip(exact, codecs, strict=True)]
        if not all(mx.all(mx.isfinite(part)).item() for part in rounded):
            codes = quantize(self._backend, codecs, *exact)
            dtypes = (exact[0].dtype, exact[1].dtype)
            found = find_unheld(self.spec, codes.keys, codes.values, dtypes, start=start)
            raise NonFiniteError(in_layer(self.layer, str(found)))
        del exact  # a view makes a write copy the whole array
        for array, codec, part in zip((self.keys, self.values), codecs, rounded, strict=True):
            array[..., start:stop, :] = codec.rotate_back(part)

    def trim(self, n: int) -> int:
        """Drop the last ``n`` tokens and return how many were dropped; ``n`` is clamped to the tokens that are there.

        The frontier goes back to the last whole group that is kept. Tokens of a group that was cut stay as they were
        rounded and are rounded once more when they leave the window again, which moves each by at most one step of its new
        group.
        """
        trimmed: int = super().trim(max(0, n))
        sinks, group = self.spec.sink_length, self.spec.group_size
        kept = sinks + max(0, self.offset - sinks) // group * group
        self.frontier = min(self.frontier, kept)
        return trimmed

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, frontier and the spec as JSON: what ``save_prompt_cache`` writes."""
        return self.keys, self.values, self.offset, self.frontier, self.spec.model_dump_json()

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.frontier, spec = value
        self.layer = None
        self.spec = CacheSpec.model_validate_json(spec)
        self._backend = backends.resolve(self.spec.backend)

    @property
    def merge(self) -> Any:
        """Not there: a batch of these would silently be full caches. mlx-lm looks for it, and then batches no request.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"{self.spec.slug}: the round-trip cache has no batched form; use kind kivi")

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Refuse: rounding what is rounded would measure neither quantiser.

        Raises:
            SpecError: always.
        """
        raise SpecError(f"kv_bits={bits}, kv_group_size={group_size}: {self.spec.slug} is quantised already; leave kv_bits out")

    def bytes(self) -> CacheBytes:
        """Return what is live: every token in full precision, and the capacity beside them."""
        if self.keys is None:
            return CacheBytes(resident=0, full_precision=0)
        resident = resident_bytes((self.keys, self.values))
        held = resident // self.keys.shape[2] * self.offset
        return CacheBytes(resident=resident, full_precision=held, residual=held, spare=resident - held)

    def packed_bytes(self) -> CacheBytes:
        """Return what the same tokens would weigh if they were packed: an estimate of no array that exists.

        ``resident`` is the true figure all the same, so the estimate is not honest and does not claim to be.
        """
        if self.keys is None:
            return CacheBytes(resident=0, full_precision=0)
        quantized = max(0, self.frontier - self.spec.sink_length)
        return packed_bytes(
            self.spec.codecs,
            Token.of(self.keys, self.values),
            rows=self.keys.shape[0] * self.keys.shape[1],
            quantized=quantized,
            exact=self.offset - quantized,
            resident=resident_bytes((self.keys, self.values)),
        )
