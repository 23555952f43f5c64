"""KIVICache: one layer's keys and values as packed codes plus a window of exact tokens, in mlx-lm's cache protocol.

The layout of a layer (KIVI, arXiv:2402.02750, section 3; the sinks are not in the paper)::

    | sinks, exact | codes: keys per channel, values per token | residual window, exact |
    0         sink_length                                 frontier                   offset

Tokens leave the window in whole groups counted from position 0::

    frontier = sink_length + floor(max(0, offset - sink_length - residual_length) / G) * G

so the window holds ``residual_length`` to ``residual_length + G - 1`` tokens, and codes, once written, never change.

What a query sees: a call's queries see as quantised what the call's *first* query would see if tokens came one at a time;
the call's other tokens are exact for it. After the call the state is that of its last token, whatever the chunking.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_cache

from kivi.accounting import CacheBytes, Token, packed_bytes
from kivi.attention import require_dispatch
from kivi.backends import Backend, History, Packed, resolve
from kivi.cache.masks import require_question
from kivi.cache.overflow import Checked, Flags, NonFiniteError, quantize
from kivi.cache.state import STATE_ARRAYS, Value, loadable, require_state
from kivi.cache.storage import CodeStore, ExactStore, live_arrays, live_bytes, require_fitting
from kivi.spec import CacheSpec, SpecError

# Up to here queries attend on codes; more queries share the cost of dequantising the history once. Enough for decoding and
# for the drafts of speculative decoding (mlx-lm's default is 2 or 3 a step).
MAX_CODE_QUERIES = 8

_backend = functools.cache(resolve)  # asking what the machine has is slow; a cache holds a name, so that it can be copied


@loadable
class KIVICache(Checked):
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

    A group that its scale and zero cannot hold (:mod:`kivi.cache.overflow`), or that holds NaN or infinity, is refused with a
    :class:`~kivi.cache.overflow.NonFiniteError`: by the second call after the one that quantised it, or by whatever asks for the
    state or the numbers before that.

    Args:
        spec: A spec with ``kind="kivi"``, without settings by layer.

    Raises:
        SpecError: the spec is of another kind, or has settings by layer.
        BackendError: the spec's backend is not available here.
    """

    # mlx-lm takes a cache with an attribute `bits` for its own quantised cache (see its models/base.py), so there is none.

    _window: ExactStore

    max_code_queries = MAX_CODE_QUERIES  # of a call; longer ones dequantise

    def __init__(self, spec: CacheSpec) -> None:
        if CacheSpec.required(spec).kind != "kivi":
            raise SpecError(f"kind={spec.kind!r}: KIVICache takes a spec with kind='kivi'")
        if spec.layers:
            raise SpecError(f"{spec.slug}: a cache is one layer's, use make_prompt_cache for settings by layer")
        _backend(spec.backend)  # a missing backend is an error before any token comes
        self.spec = spec
        self.offset = 0
        self._unchecked = Flags()
        self._sinks = ExactStore(spec.sink_length)
        self._codes = CodeStore(key_bits=spec.key_bits, value_bits=spec.value_bits, group_size=spec.group_size)
        self._window = ExactStore(spec.residual_length + spec.group_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec.slug}, offset={self.offset})"

    @property
    def backend(self) -> Backend:
        """Who runs the kernels."""
        return _backend(self.spec.backend)

    @property
    def frontier(self) -> int:
        """Position up to which tokens are sinks or quantised for the queries of the last call; the window holds the rest."""
        return self._sinks.count + self._codes.count

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys ``[B, H, S, D_k]`` and values ``[B, H, S, D_v]``; return them, the call's own tokens, as they are.

        Raises:
            AttentionError: the caller is a model of mlx-lm that would attend to the call's tokens alone.
            NonFiniteError: an earlier call brought what cannot be quantised.
            ValueError: keys and values do not go together, or not with what is here; the cache is as it was.
        """
        require_dispatch(sys._getframe(1).f_globals)
        require_fitting(keys, values, (self._window.keys, self._window.values))
        self._settle()
        if self._unchecked.waiting:
            self._check_due()
        first = self._frontier_of(self.offset + min(1, keys.shape[-2]))
        calls = 1 if keys.shape[-2] == 1 else 0
        if first <= self.offset:  # else the call's first token belongs to the group that its own query sees quantised
            self._flush(first, calls)
        to_sinks = min(keys.shape[-2], max(0, self.spec.sink_length - self.offset))
        if to_sinks:
            self._sinks.append(keys[..., :to_sinks, :], values[..., :to_sinks, :])
        self._window.append(keys[..., to_sinks:, :], values[..., to_sinks:, :])
        self.offset += keys.shape[-2]
        self._flush(first, calls)
        return keys, values

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend to all tokens with the queries of the last call.

        Args:
            queries: ``[B, H_q, L, D_k]``, ``H_q`` a multiple of the KV heads. Not modified.
            scale: Factor of the scores, usually ``D_k ** -0.5``.
            mask: None, ``"causal"``, or an array, boolean (True: seen) or additive, that broadcasts to ``[B, H_q, L, offset]``.
            sinks: Attention sinks, one logit a query head ``[H_q]``.

        Returns:
            ``[B, H_q, L, D_v]`` in the dtype of the queries.

        Raises:
            ValueError: queries or mask do not go with what is here.
        """
        require_question(queries, mask, self._window.buffers()[0], self.offset)
        if self._codes.count == 0 or queries.shape[-2] > self.max_code_queries:
            keys, values = self._restored()
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            return out.astype(queries.dtype)
        history = self._history()
        causal = isinstance(mask, str)
        columns = None if mask is None or isinstance(mask, str) else self._in_storage_order(mask)
        return self.backend.decode_attention(queries, history, scale=scale, causal=causal, mask=columns, sinks=sinks)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all tokens in order as the queries of the last call see them, keys and values ``[B, H, offset, D]``.

        Costly: the history is dequantised at each call, as :func:`kivi.quantize.group_dequantize` does.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._check()
        return self._restored()

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        """Return the mask of the next ``N`` tokens, as mlx-lm's ``KVCache`` does."""
        mask: mx.array | str | None = mlx_lm_cache.create_attention_mask(*args, offset=self.offset, **kwargs)
        return mask

    def size(self) -> int:
        """Return the number of tokens."""
        return self.offset

    def empty(self) -> bool:
        """Return whether there is no token."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

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

    @property
    def state(self) -> dict[str, Value]:
        """What the cache is, the tokens that are there and no spare capacity, for ``save_prompt_cache`` and ``mx.eval``.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._settle_checked()
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
        return {"spec": self.spec.model_dump_json(), "layer": self.layer, "offset": self.offset, **arrays}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(self.from_state(state)))

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
        cache.layer = state.get("layer")  # files of earlier versions have none
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
            cache._settle_checked()
            mx.eval(list(live_arrays(vars(cache))))  # lets go of the full arrays
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KIVICache]) -> Any:
        """Return a :class:`kivi.cache.batch.BatchKIVICache` whose rows are ``caches``."""
        from kivi.cache.batch import BatchKIVICache  # batches build on single caches

        return BatchKIVICache.merge(caches)

    def dequantized(self) -> tuple[mx.array, mx.array]:
        """Return all tokens in order as the next call sees them before its own: keys and values ``[B, H, offset, D]``."""
        self._settle_checked()
        return self._restored()

    def bytes(self) -> CacheBytes:
        """Return what the cache weighs now; ``resident`` is measured from the live arrays, all else is counted.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._settle_checked()
        resident = live_bytes(vars(self))
        if self._window.keys is None or self._window.values is None:
            return CacheBytes(resident=resident, full_precision=0)
        batch, heads = self._window.keys.shape[:2]
        token = Token.of(self._window.keys, self._window.values)
        bill = functools.partial(packed_bytes, self.spec, token, rows=batch * heads, resident=resident)
        quantized, exact = self._codes.count, self._sinks.count + self._window.count
        unused = bill(quantized=self._codes.capacity - quantized, exact=self._sinks.capacity + self._window.capacity - exact)
        return bill(quantized=quantized, exact=exact, spare=unused.accounted)

    @property
    def nbytes(self) -> int:
        """Bytes of the live arrays."""
        return self.bytes().resident

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
            for what, part in zip(("key", "value"), store.live() if store.count else (), strict=False):
                flags = mx.any(~mx.isfinite(part), axis=(0, 1, 3))
                if mx.any(flags):
                    raise NonFiniteError(
                        f"layer {layer}: NaN or infinity in the exact {what} at token {start + int(mx.argmax(flags))}; "
                        "look at the model's weights and dtype"
                    )

    def _frontier_of(self, offset: int) -> int:
        """Return the frontier of a cache that was given ``offset`` tokens and never trimmed."""
        return min(offset, self.spec.sink_length) + self.spec.quantized_tokens(offset)

    def _flush(self, frontier: int, calls: int) -> None:
        """Quantise the tokens of the window before ``frontier``, and have a look at it once ``calls`` calls have gone by."""
        count = frontier - self.frontier
        if count <= 0:
            return
        keys, values = self._window.live()
        quantized = quantize(self.backend, self.spec, keys[..., :count, :], values[..., :count, :])
        self._codes.append(quantized.keys, quantized.values)
        self._unchecked.add(quantized.unheld, calls=calls)
        self._window.drop_first(count)

    def _settle(self) -> None:
        """Bring the state to that of the last token, once the call's queries are through."""
        self._flush(self._frontier_of(self.offset), calls=0)

    def _codes_by_row(self) -> Iterator[tuple[int, int, Packed, Packed]]:
        if self._codes.count:
            yield 0, self._sinks.count, *self._codes.slice(0, self._codes.count)

    def _restored(self) -> tuple[mx.array, mx.array]:
        if self.frontier == 0:
            return self._window.live()
        return self.backend.restore(self._history(), columns=self.offset)

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

    def _history(self) -> History:
        codes, window = self._codes, self._window
        window_keys, window_values = window.buffers()
        return History(
            key_bits=self.spec.key_bits,
            value_bits=self.spec.value_bits,
            group_size=self.spec.group_size,
            sink_keys=self._sinks.keys,
            sink_values=self._sinks.values,
            keys=codes.keys,
            values=codes.values,
            window_keys=window_keys,
            window_values=window_values,
            sink_count=self._sinks.count,
            code_count=codes.count,
            window_count=window.count,
        )

    def _in_storage_order(self, mask: mx.array) -> mx.array:
        """Return the mask with unused columns for the spare capacities."""
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
