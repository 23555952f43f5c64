"""PackedCache: what the cache of one sequence and that of a batch share.

Both hold three stretches of tokens, oldest first: exact sinks, codes, and a window of exact tokens. They differ in how they
keep them: :mod:`kivi.cache.storage` for one sequence, :mod:`kivi.cache.rows` for rows of different lengths.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kivi.accounting import CacheBytes, Token, packed_bytes
from kivi.attention import require_dispatch
from kivi.backends import Backend, History, resolve
from kivi.cache.masks import require_question
from kivi.cache.overflow import Flags, NonFiniteError, any_unheld, find_unheld, in_layer, quantize
from kivi.cache.rows import CodeRows, RowWindow, SinkRows
from kivi.cache.state import Value
from kivi.cache.storage import CodeStore, ExactStore, live_arrays, live_bytes, require_fitting
from kivi.codec import Packed
from kivi.spec import CacheSpec, SpecError

# Up to here queries attend on codes; more queries share the cost of dequantising the history once. Enough for decoding and
# for the drafts of speculative decoding (mlx-lm's default is 2 or 3 a step).
MAX_CODE_QUERIES = 8
SHORT_CALL = 16  # tokens of a call up to which its queries see what they would if its tokens came one at a time


class _LongCall(threading.local):
    """The layers that were asked in this thread's last call that was no short one."""

    def __init__(self) -> None:
        self.caches: weakref.WeakKeyDictionary[PackedCache, None] = weakref.WeakKeyDictionary()
        self._last = -1

    def add(self, cache: PackedCache) -> None:
        """Add the layer that follows, or the first one of another call."""
        layer = -1 if cache.layer is None else cache.layer
        if layer <= self._last:
            self.caches.clear()
        self.caches[cache] = None
        self._last = layer

    def take(self) -> list[PackedCache]:
        """Return the layers, and forget them."""
        caches = list(self.caches)
        self.caches.clear()
        return caches


_long_call = _LongCall()
_backend = functools.cache(resolve)  # asking what the machine has is slow; a cache holds a name, so that it can be copied


class Tokens(NamedTuple):
    """How many tokens of all rows are quantised, or have room to be, and how many are exact."""

    quantized: int
    exact: int


class PackedCache(ABC):
    """One layer's keys and values as packed codes plus exact tokens, in mlx-lm's cache protocol.

    A group that its scale and zero cannot hold (:mod:`kivi.cache.overflow`), or that holds NaN or infinity, is refused with a
    :class:`~kivi.cache.overflow.NonFiniteError`: by the second call after the one that quantised it, or by whatever asks for
    the state or the numbers before that.

    Where the spec rotates keys or values, everything that is stored is rotated, exact tokens too, and so is :attr:`state`.
    What comes in and goes out is not.

    Args:
        spec: A spec with ``kind="kivi"``, without settings by layer.

    Raises:
        SpecError: the spec is of another kind, or has settings by layer.
        BackendError: the spec's backend is not available here.
    """

    # mlx-lm takes a cache with an attribute `bits` for its own quantised cache (see its models/base.py), so there is none.

    max_code_queries = MAX_CODE_QUERIES  # of a call; longer ones dequantise

    layer: int | None = None  # index, for messages; make_prompt_cache sets it

    _sinks: ExactStore | SinkRows
    _codes: CodeStore | CodeRows
    _window: ExactStore | RowWindow

    def __init__(self, spec: CacheSpec) -> None:
        if CacheSpec.required(spec).kind != "kivi":
            raise SpecError(f"kind={spec.kind!r}: {type(self).__name__} takes a spec with kind='kivi'")
        if spec.layers:
            raise SpecError(f"{spec.slug}: a cache is one layer's, use make_prompt_cache for settings by layer")
        _backend(spec.backend)  # a missing backend is an error before any token comes
        self.spec = spec
        self._codecs = spec.codecs
        self._rotated = self._codecs.rotated
        self._unchecked = Flags()

    @property
    def backend(self) -> Backend:
        """Who runs the kernels."""
        return _backend(self.spec.backend)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys ``[B, H, S, D_k]`` and values ``[B, H, S, D_v]``; return them, the call's own tokens, as they are.

        Raises:
            AttentionError: the caller is a model of mlx-lm that would attend to the call's tokens alone.
            NonFiniteError: an earlier call brought what cannot be quantised.
            RotationError: they have a number of channels that cannot be rotated as the spec wants.
            ValueError: keys and values do not go together, or not with what is here; the cache is as it was.
        """
        require_dispatch(sys._getframe(1).f_globals)
        require_fitting(keys, values, (self._window.keys, self._window.values))
        if self._rotated:
            self._store(self._codecs.keys.rotate(keys), self._codecs.values.rotate(values))
        else:
            self._store(keys, values)
        return keys, values

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend to all tokens of each row with the queries of the last call.

        Args:
            queries: ``[B, H_q, L, D_k]``, ``H_q`` a multiple of the KV heads. Not modified.
            scale: Factor of the scores, usually ``D_k ** -0.5``.
            mask: None, ``"causal"``, or an array as :meth:`make_mask` makes them: boolean (True: seen) or additive,
                broadcastable to ``[B, H_q, L, size()]``, in left-padded coordinates for a batch.
            sinks: Attention sinks, one logit a query head ``[H_q]``.

        Returns:
            ``[B, H_q, L, D_v]`` in the dtype of the queries; rows of padding are unspecified.

        Raises:
            ValueError: queries or mask do not go with what is here.
        """
        require_question(queries, mask, self._window.buffers()[0], self.size())
        if self._rotated:
            out = self._attend(self._codecs.keys.rotate(queries), scale, mask, sinks)
            return self._codecs.values.rotate_back(out)
        return self._attend(queries, scale, mask, sinks)

    def _attend(self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None) -> mx.array:
        """Attend to the stored numbers, which may be rotated, with queries that are rotated as the keys are."""
        length = queries.shape[-2]
        mask = self._mask_of_call(mask, length)
        if length > SHORT_CALL:
            _long_call.add(self)
        if length > 1 and mask is not None and (cuts := self._cuts(length)):
            return self._attend_in_parts(queries, scale, mask, sinks, cuts)
        return self._attend_as_it_is(queries, scale, mask, sinks)

    def _attend_in_parts(
        self, queries: mx.array, scale: float, mask: mx.array | str, sinks: mx.array | None, cuts: Sequence[int]
    ) -> mx.array:
        """Attend with the queries from each of ``cuts`` on when more is quantised, as if tokens came one at a time."""
        length = queries.shape[-2]
        columns: mx.array = create_causal_mask(length, offset=self.size() - length) if isinstance(mask, str) else mask
        outputs = []
        for start, stop in itertools.pairwise((0, *cuts, length)):
            rows = columns if columns.ndim < 2 or columns.shape[-2] == 1 else columns[..., start:stop, :]
            outputs.append(self._as_seen_by(start, length)._attend_as_it_is(queries[..., start:stop, :], scale, rows, sinks))
        return mx.concatenate(outputs, axis=-2)

    def _as_seen_by(self, query: int, length: int) -> Self:
        """Return a copy as query number ``query`` of the last call's ``length`` sees it, to attend to and be forgotten.

        What it quantises is written into spare capacity, where the call's end writes the same again.
        """
        seen = copy.copy(self)
        seen._unchecked = Flags()
        seen._sinks, seen._codes, seen._window = self._sinks.twin(), self._codes.twin(), self._window.twin()
        seen._flush_for(query, length)
        return seen

    def _attend_as_it_is(
        self, queries: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
    ) -> mx.array:
        """Attend with queries that all see the cache as it is, but for the mask."""
        length = queries.shape[-2]
        if not self._attends_on_codes(length):
            keys, values = self._restore()
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            return out.astype(queries.dtype)
        causal = isinstance(mask, str)
        columns = None if mask is None or isinstance(mask, str) else self._in_storage_order(mask)
        return self.backend.decode_attention(queries, self._history(), scale=scale, causal=causal, mask=columns, sinks=sinks)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all tokens in order as the first query of the last call sees them, keys and values ``[B, H, size(), D]``.

        Costly: the history is dequantised at each call, as :func:`kivi.quantize.group_dequantize` does.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._check()
        keys, values = self._restore()
        return self._codecs.keys.rotate_back(keys), self._codecs.values.rotate_back(values)

    @abstractmethod
    def size(self) -> int:
        """Return the number of tokens; of a batch, that of the columns."""

    def empty(self) -> bool:
        """Return whether there is no token."""
        return self.size() == 0

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    @property
    def state(self) -> dict[str, Value]:
        """What the cache is, lengths and arrays, for ``save_prompt_cache`` and ``mx.eval``.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._settle_and_check()
        return {"spec": self.spec.model_dump_json(), "layer": self.layer, **self._state()}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(self.from_state(state)))

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Return the cache whose :attr:`state` this is, in arrays of its own."""

    def bytes(self) -> CacheBytes:
        """Return what the cache weighs now; ``resident`` is measured from the live arrays, all else is counted.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._settle_and_check()
        resident = live_bytes(vars(self))
        if self._window.keys is None or self._window.values is None:
            return CacheBytes(resident=resident, full_precision=0)
        token, heads = Token.of(self._window.keys, self._window.values), self._window.keys.shape[1]
        bill = functools.partial(packed_bytes, self._codecs, token, rows=heads, resident=resident)
        held, room = self._held(), self._room()
        unused = bill(quantized=room.quantized - held.quantized, exact=room.exact - held.exact)
        return bill(quantized=held.quantized, exact=held.exact, spare=unused.accounted)

    @property
    def nbytes(self) -> int:
        """Bytes of the live arrays."""
        self._settle_and_check()
        return live_bytes(vars(self))

    def _attends_on_codes(self, length: int) -> bool:
        """Return whether ``length`` queries attend on codes, rather than on dequantised numbers."""
        return length <= self.max_code_queries

    @abstractmethod
    def _restore(self) -> tuple[mx.array, mx.array]:
        """Return :meth:`keys_and_values` as they are stored, rotated or not."""

    def _room(self) -> Tokens:
        rows = 0 if self._window.keys is None else self._window.keys.shape[0]
        return Tokens(rows * self._codes.capacity, rows * (self._sinks.capacity + self._window.capacity))

    @abstractmethod
    def _held(self) -> Tokens:
        """Return the tokens of all rows."""

    @abstractmethod
    def _state(self) -> dict[str, Value]:
        """Return :attr:`state` of a cache that is settled."""

    @abstractmethod
    def _store(self, keys: mx.array, values: mx.array) -> None:
        """Take in a call's tokens."""

    @abstractmethod
    def _settle(self) -> None:
        """Bring the state to that of the last token, once the call's queries are through."""

    @abstractmethod
    def _cuts(self, length: int) -> list[int]:
        """Return from which of the last call's ``length`` queries on more is quantised, in rows whose call is a short one."""

    def _cuts_of_row(self, before: int, taken: int, quantized: int) -> list[int]:
        """Return which of the ``taken`` tokens of a row's short call see more quantised than the one before them.

        Args:
            before: Tokens of the row before the call.
            taken: Tokens of the call.
            quantized: Tokens that its first query sees quantised.
        """
        due = self.spec.quantized_tokens
        if not 1 < taken <= SHORT_CALL or due(before + taken) <= max(due(before + 1), quantized):
            return []
        return [token for token in range(1, taken) if due(before + token + 1) > max(due(before + token), quantized)]

    @abstractmethod
    def _flush_for(self, query: int, length: int) -> None:
        """Quantise what is quantised for query number ``query`` of the last call's ``length``."""

    @abstractmethod
    def _mask_of_call(self, mask: mx.array | str | None, length: int) -> mx.array | str | None:
        """Return the mask that ``length`` queries are asked with, if they are asked with ``mask``."""

    @abstractmethod
    def _in_storage_order(self, mask: mx.array) -> mx.array:
        """Return a mask of tokens as one of the capacities of sinks, codes and window."""

    @abstractmethod
    def _counts(self) -> tuple[int, int, int] | tuple[mx.array, mx.array, mx.array]:
        """Return the tokens of sinks, codes and window; as int32 ``[B]`` where rows differ."""

    @abstractmethod
    def _codes_by_row(self) -> Iterator[tuple[int, int, Packed, Packed]]:
        """Yield index of the first row, position of the first token, and codes of rows that are equally long."""

    def _quantize(self, keys: mx.array, values: mx.array, calls: int) -> tuple[Packed, Packed]:
        """Return the codes of whole groups, which are looked at once ``calls`` more calls have gone by."""
        quantized = quantize(self.backend, self._codecs, keys, values)
        self._unchecked.add(quantized.unheld, calls=calls)
        return quantized.keys, quantized.values

    def _check_later(self, codes: Sequence[mx.array]) -> None:
        """Have words, scales and zeros of keys and values, which were loaded, looked at with the next call."""
        self._unchecked.add(any_unheld(self._codecs, Packed(*codes[:3]), Packed(*codes[3:]), self._dtypes()), calls=0)

    def _check_due(self) -> None:
        """Count a call, and refuse what is due."""
        if self._unchecked.next_call():
            self._refuse()

    def _settle_and_check(self) -> None:
        """Settle, and refuse what cannot be restored.

        After a long call all its layers are settled, and waited for at once: mlx-lm asks one after the other for their states,
        and a GPU would idle between them.
        """
        self._settle()
        if self in _long_call.caches:
            layers = _long_call.take()
            for layer in layers:
                layer._settle()
            mx.eval([list(live_arrays(vars(layer))) for layer in layers])
        self._check()

    def _check(self) -> None:
        """Refuse what was quantised and cannot be restored; waits for the arrays where there is something to look at."""
        if self._unchecked.waiting:
            mx.eval(list(live_arrays(vars(self))))  # all: what is evaluated in parts holds on to its exact tokens
            if self._unchecked.any_set():
                self._refuse()

    def _refuse(self, layer: int | None = None) -> None:
        """Raise for the first group that cannot be restored; there is none if its row has left the batch."""
        for row, start, keys, values in self._codes_by_row():
            if found := find_unheld(self.spec, keys, values, self._dtypes(), start=start, row=row):
                raise NonFiniteError(in_layer(self.layer if layer is None else layer, found))
        self._unchecked.waiting.clear()

    def _dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """Return what keys and values are restored to."""
        keys, values = self._window.buffers()
        return keys.dtype, values.dtype

    def _history(self) -> History:
        window_keys, window_values = self._window.buffers()
        sink_count, code_count, window_count = self._counts()
        return History(
            self._codecs,
            self._sinks.keys,
            self._sinks.values,
            self._codes.keys,
            self._codes.values,
            window_keys,
            window_values,
            sink_count,
            code_count,
            window_count,
        )
