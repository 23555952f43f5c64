"""KIVICache: one layer's keys and values as packed codes plus a window of exact tokens, in mlx-lm's cache protocol.

The layout of a layer (KIVI, arXiv:2402.02750, section 3; the sinks are not in the paper)::

    | sinks, exact | codes: keys per channel, values per token | residual window, exact |
    0         sink_length                                 frontier                   offset

Tokens leave the window in whole groups counted from position 0::

    frontier = sink_length + floor(max(0, offset - sink_length - residual_length) / G) * G

so the window holds ``residual_length`` to ``residual_length + G - 1`` tokens, and codes, once written, never change.

What a query sees: the queries of a short call, of at most 16 tokens, see as quantised what they would see if tokens came one at
a time, so that drafts change nothing. Those of a longer call see as quantised what its *first* query would see; the call's
other tokens are exact for them. After the call the state is that of its last token, whatever the chunking.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from kivi.cache.overflow import NonFiniteError, in_layer, not_finite
from kivi.cache.packed import PackedCache, Tokens
from kivi.cache.state import STATE_ARRAYS, Value, loadable, require_state
from kivi.cache.storage import CodeStore, ExactStore, live_arrays
from kivi.codec import Packed
from kivi.spec import CacheSpec


@loadable
class KIVICache(PackedCache):
    """A packed KV cache of one layer, of one sequence or of several of equal length.

    mlx-lm's ``scaled_dot_product_attention`` must be dispatched to :meth:`attend` (see :mod:`kivi.attention`): what
    :meth:`update_and_fetch` returns is the call's own tokens alone.

    Resident arrays: codes with less than ``n / 32 + 256`` tokens of spare capacity for ``n`` quantised tokens, ``sink_length``
    exact sinks, and a window of ``residual_length + group_size``; beside them, until the next call or question, the tokens of a
    longer call.

    Trimming within the window is exact. Tokens of the last call that are trimmed leave no trace, but for the call's first,
    whose query has seen its groups; after that and after earlier calls' tokens the frontier stays, so it may run ahead of
    the formula above by as many groups as were trimmed, rounded up. Trimming into the codes keeps whole groups as they are;
    the tokens of the group that was cut return to the window as they were rounded, at most ``group_size - 1`` of them, and
    are rounded again when their group is full. That second rounding moves a key by at most half the new group's scale, its
    zero's rounding to ``param_dtype`` apart; it leaves a value as it is, but for the rounding of ``param_dtype`` and of the
    cache's dtype: its group is one token's.

    Args:
        spec: A spec with ``kind="kivi"``, without settings by layer.

    Raises:
        SpecError: the spec is of another kind, or has settings by layer.
        BackendError: the spec's backend is not available here.
    """

    batch_class: ClassVar[type[Any]]  # kivi.cache.batch, which builds on this module, sets it

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self.offset = 0
        self._sinks: ExactStore = ExactStore(spec.sink_length)
        self._codes: CodeStore = CodeStore(self._codecs)
        self._window: ExactStore = ExactStore(spec.residual_length + spec.group_size)
        self._longest_exact = spec.sink_length + spec.residual_length + spec.group_size  # with as many a group is quantised

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.slug}, offset={self.offset})"

    @property
    def frontier(self) -> int:
        """Position up to which tokens are sinks or quantised for the queries of the last call; the window holds the rest."""
        return self._sinks.count + self._codes.count

    def _restore(self) -> tuple[mx.array, mx.array]:
        if self.frontier == 0:
            return self._window.live()
        return self.backend.restore(self._history(), columns=self.offset)

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        """Return the mask of the next ``N`` tokens, as mlx-lm's ``KVCache`` does."""
        mask: mx.array | str | None = mlx_lm_cache.create_attention_mask(*args, offset=self.offset, **kwargs)
        return mask

    def size(self) -> int:
        return self.offset

    def newest(self) -> tuple[mx.array, mx.array]:
        """Return the arrays of the newest keys and values ``[B, H, capacity, D]``, as they are stored.

        Raises:
            ValueError: no token was ever stored.
        """
        return self._window.buffers()

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` tokens, at most all, and return how many were forgotten.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._check()
        n = max(0, min(self.offset, operator.index(n)))
        kept = self.offset - n
        if kept < self.frontier:
            self._reopen(kept)
        self._window.truncate(kept - self.frontier)
        self.offset = kept
        self._settle()  # only now: what the last call brought and is forgotten, as rejected drafts are, quantises nothing
        self._window.shrink()
        return n

    def _state(self) -> dict[str, Value]:
        """Return the tokens that are there, without spare capacity."""
        exact: list[mx.array | None] = [None] * 4
        if self._sinks.keys is not None:
            exact[:2] = self._sinks.live()
        if self._window.keys is not None:
            exact[2:] = self._window.live()
        codes: list[mx.array | None] = [None] * 6
        if self._codes.count:
            keys, values = self._codes.slice(0, self._codes.count)
            codes = [*keys, *values]
        arrays = dict(zip(STATE_ARRAYS, [*exact, *codes], strict=True))
        return {"offset": self.offset, **arrays}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Return the cache whose :attr:`state` this is, in arrays of its own.

        Raises:
            SpecError: the spec that was saved is not one of this version.
            BackendError: it names a backend that is not available here; caches saved with ``backend="auto"`` go anywhere.
            ValueError: it is no state of a packed cache, or is damaged.
        """
        require_state(state, ("spec", "offset"))
        cache = cls(CacheSpec.from_json(state["spec"]))
        cache.layer = state.get("layer")  # states of version 0.1.0 have none
        cache.offset = state["offset"]
        sink_keys, sink_values, window_keys, window_values, *codes = (state[name] for name in STATE_ARRAYS)
        if sink_keys is not None:
            cache._sinks.append(sink_keys, sink_values)
        if window_keys is not None:
            cache._window.append(window_keys, window_values)
        if codes[0] is not None:
            cache._codes.append(Packed(*codes[:3]), Packed(*codes[3:]))
            cache._check_later(codes)
        if (held := cache.frontier + cache._window.count) != cache.offset:
            raise ValueError(
                f"offset={cache.offset}: the state's arrays hold {held} tokens, so it is damaged; make the cache anew"
            )
        return cache

    @classmethod
    def from_full(cls, full: mlx_lm_cache.KVCache, spec: CacheSpec) -> Self:
        """Return a packed cache of the tokens of mlx-lm's full-precision cache.

        Raises:
            TypeError: ``full`` is no plain ``KVCache``.
            NonFiniteError: what it holds cannot be quantised.
        """
        if type(full) is not mlx_lm_cache.KVCache:
            raise TypeError(f"{type(full).__name__}: only mlx-lm's KVCache can be converted, which holds every token in order")
        cache = cls(spec)
        if not full.empty() and full.offset:
            cache.update_and_fetch(full.keys[..., : full.offset, :], full.values[..., : full.offset, :])
            cache._settle_and_check()
            mx.eval(list(live_arrays(vars(cache))))  # lets go of the full arrays
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KIVICache]) -> Any:
        """Return a :class:`kivi.cache.batch.BatchKIVICache` whose rows are ``caches``."""
        return cls.batch_class.merge(caches)

    def dequantized(self) -> tuple[mx.array, mx.array]:
        """Return all tokens in order as the next call sees them before its own: keys and values ``[B, H, offset, D]``."""
        self._settle()
        return self.keys_and_values()

    def check_finite(self, layer: int) -> None:
        """Look for NaN and infinity in everything that is stored; waits for the arrays, so call it once a cell.

        Args:
            layer: Index of the layer, for the message.

        Raises:
            NonFiniteError: something is not finite, or cannot be restored; the message names layer, what and token position.
        """
        self._settle()
        self._refuse(layer)
        for store, start in ((self._sinks, 0), (self._window, self.frontier)):
            for what, part, codec in zip(("key", "value"), store.live() if store.count else (), self._codecs, strict=False):
                flags = mx.any(~mx.isfinite(part), axis=(0, 1, 3))
                if mx.any(flags):
                    position = start + int(mx.argmax(flags))
                    raise NonFiniteError(in_layer(layer, not_finite(f"exact {what}", position, codec, part.dtype)))

    def _store(self, keys: mx.array, values: mx.array) -> None:
        self._settle()
        if self._unchecked.waiting:
            self._check_due()
        tokens = keys.shape[2]
        first = self.offset + min(1, tokens)
        calls = 1 if tokens == 1 else 0
        self._flush(first, calls)  # but if the call's first token belongs to the group that its own query sees quantised
        to_sinks = min(tokens, max(0, self.spec.sink_length - self.offset))
        if to_sinks:
            self._sinks.append(keys[..., :to_sinks, :], values[..., :to_sinks, :])
            keys, values = keys[..., to_sinks:, :], values[..., to_sinks:, :]
        self._window.append(keys, values)
        self.offset += tokens
        self._flush(first, calls)

    def _flush(self, offset: int, calls: int = 0) -> None:
        """Quantise what is quantised of ``offset`` tokens in a cache that was never trimmed, if all of it is here.

        The codes are looked at once ``calls`` more calls have gone by.
        """
        if offset < self._codes.count + self._longest_exact:
            return  # no group more; a decode step mostly ends here
        count = self.spec.quantized_tokens(offset) - self._codes.count
        if count > self._window.count:
            return
        keys, values = self._window.live()
        self._codes.append(*self._quantize(keys[..., :count, :], values[..., :count, :], calls))
        self._window.drop_first(count)

    def _settle(self) -> None:
        self._flush(self.offset)

    def _cuts(self, length: int) -> list[int]:
        return self._cuts_of_row(self.offset - length, length, self._codes.count)

    def _flush_for(self, query: int, length: int) -> None:
        self._flush(self.offset - length + query + 1)

    def _reopen(self, kept: int) -> None:
        """Move the frontier back to the last whole group of the first ``kept`` tokens; what follows returns to the window."""
        self._window.truncate(0)
        group_size = self.spec.group_size
        in_codes = max(0, kept - self.spec.sink_length)
        whole = in_codes // group_size * group_size
        if in_codes > whole:
            keys, values = self._codes.slice(whole, whole + group_size)
            cut = replace(self._history(), keys=keys, values=values, sink_count=0, code_count=group_size)
            self._window.append(*self.backend.restore(cut, columns=group_size))
        self._codes.truncate(whole)
        self._sinks.truncate(kept)

    def _codes_by_row(self) -> Iterator[tuple[int, int, Packed, Packed]]:
        if self._codes.count:
            yield 0, self._sinks.count, *self._codes.slice(0, self._codes.count)

    def _attends_on_codes(self, length: int) -> bool:
        return self._codes.count > 0 and super()._attends_on_codes(length)

    def _held(self) -> Tokens:
        rows = 0 if self._window.keys is None else self._window.keys.shape[0]
        return Tokens(rows * self._codes.count, rows * (self._sinks.count + self._window.count))

    def _counts(self) -> tuple[int, int, int]:
        return self._sinks.count, self._codes.count, self._window.count

    def _mask_of_call(self, mask: mx.array | str | None, length: int) -> mx.array | str | None:  # noqa: ARG002
        return mask

    def _in_storage_order(self, mask: mx.array) -> mx.array:
        if mask.shape[-1] == 1:
            return mask  # it broadcasts
        columns = []
        start = 0
        for store in (self._sinks, self._codes, self._window):
            part = mask[..., start : start + store.count]
            start += store.count
            columns.append(mx.pad(part, [(0, 0)] * (mask.ndim - 1) + [(0, store.capacity - store.count)]))
        return mx.concatenate(columns, axis=-1)


@loadable
class DequantizedKIVICache(KIVICache):
    """The control lane: the same codes, but every query attends by standard attention on the dequantised history.

    Against the full cache it shows the quantiser's error, against :class:`KIVICache` that of the attention on codes.
    """

    max_code_queries = 0
