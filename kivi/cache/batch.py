"""BatchKIVICache: packed sequences of different lengths side by side, in the protocol of mlx-lm's batch generator.

mlx-lm pads the shorter sequences of a batch on the left and makes one mask for all layers in those padded coordinates. Here
padding takes no part: the codes of a row begin at the row's own position 0 and its window ends with its newest token
(:mod:`kivi.cache.rows`), so its groups are those of the sequence alone, whatever its neighbours do::

    row 0   | sinks | codes codes codes codes |     spare |      window |
    row 1   | sinks | codes codes |                 spare |  window     |
                                                                         the newest token of every row
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kivi.accounting import CacheBytes, Token, packed_bytes
from kivi.attention import require_dispatch
from kivi.backends import Backend, History, Packed, resolve
from kivi.cache.masks import default_mask, in_storage_order, require_question
from kivi.cache.overflow import Checked, Flags, quantize
from kivi.cache.padding import Padding
from kivi.cache.rows import RowWindow, code_rows, sink_rows
from kivi.cache.single import MAX_CODE_QUERIES, KIVICache
from kivi.cache.state import STATE_ARRAYS, Value, loadable, require_state
from kivi.cache.storage import CodeStore, live_bytes, require_fitting
from kivi.spec import CacheSpec, SpecError

LENGTHS = ("offsets", "left_padding", "right_padding", "sinks", "codes", "starts")  # of a state, a number a row

_backend = functools.cache(resolve)


@loadable
class BatchKIVICache(Checked):
    """A packed KV cache of one layer for sequences of different lengths.

    Given the same keys and values, the codes of a row equal those of a :class:`~kivi.cache.single.KIVICache` of that
    sequence alone bit for bit, and its queries see the same tokens quantised. Lengths are Python integers: no step waits for
    an array.

    Args:
        spec: A spec with ``kind="kivi"``, without settings by layer.
        left_padding: For each row, how many columns of the tokens to come are padding, as for mlx-lm's ``BatchKVCache``.
    """

    def __init__(self, spec: CacheSpec, left_padding: Sequence[int]) -> None:
        KIVICache(spec)  # it refuses what it cannot take: another kind, a missing backend
        rows = len(left_padding)
        self.spec = spec
        self._offsets = [0] * rows  # tokens of each row
        self._unchecked = Flags()
        self._padding = Padding(left_padding)
        self._sinks = sink_rows(spec, rows)
        self._codes = code_rows(spec, rows)
        self._window = RowWindow(rows, slack=spec.group_size)

    @property
    def backend(self) -> Backend:
        """Who runs the kernels."""
        return _backend(self.spec.backend)

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, int32 ``[B]``, for rotary embeddings; negative in left padding."""
        return self._padding.offset

    @property
    def frontiers(self) -> list[int]:
        """Position of each row up to which tokens are sinks or quantised."""
        return [sinks + codes for sinks, codes in zip(self._sinks.counts, self._codes.counts, strict=True)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store keys ``[B, H, S, D_k]`` and values ``[B, H, S, D_v]``; return them, the call's own tokens, as they are.

        Raises:
            AttentionError: the caller is a model of mlx-lm that would attend to the call's tokens alone.
            NonFiniteError: an earlier call brought what cannot be quantised, as for a :class:`~kivi.cache.KIVICache`.
            ValueError: keys and values do not go together, or not with what is here; the batch is as it was.
        """
        require_dispatch(sys._getframe(1).f_globals)
        require_fitting(keys, values, (self._window.keys, self._window.values))
        if keys.shape[0] != len(self._offsets):
            raise ValueError(f"keys {keys.shape}: this batch has {len(self._offsets)} rows")
        self._settle()
        if self._unchecked.waiting:
            self._check_due()
        skipped, taken = self._padding.take(keys.shape[-2])
        self._window.append(keys, values)
        self._window.starts = [start + skip for start, skip in zip(self._window.starts, skipped, strict=True)]
        # What the first query of each row would see quantised if its tokens came one at a time.
        first = [offset + min(1, count) for offset, count in zip(self._offsets, taken, strict=True)]
        self._flush(first, calls=1 if keys.shape[-2] == 1 else 0)
        self._offsets = [offset + count for offset, count in zip(self._offsets, taken, strict=True)]
        return keys, values

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend to all tokens of each row with the queries of the last call.

        Args:
            queries: ``[B, H_q, L, D_k]``, ``H_q`` a multiple of the KV heads. Not modified.
            scale: Factor of the scores, usually ``D_k ** -0.5``.
            mask: As :meth:`make_mask` makes them: boolean (True: seen) or additive, broadcastable to ``[B, H_q, L, width]`` in
                left-padded coordinates. None or ``"causal"``: all but padding, or all before.
            sinks: Attention sinks, one logit a query head ``[H_q]``.

        Returns:
            ``[B, H_q, L, D_v]`` in the dtype of the queries; rows of padding are unspecified.

        Raises:
            ValueError: queries or mask do not go with what is here.
        """
        require_question(queries, mask, self._window.buffers()[0], self._padding.width)
        length = queries.shape[-2]
        if mask is None or isinstance(mask, str):
            mask = default_mask(length, self._padding, causal=mask is not None)
        if length > MAX_CODE_QUERIES:
            keys, values = self._restored()
            out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            return out.astype(queries.dtype)
        stored = self._sinks.capacity + self._codes.capacity
        columns = in_storage_order(mask, self._padding, stored=stored, window=self._window)
        return self.backend.decode_attention(queries, self._history(), scale=scale, causal=False, mask=columns, sinks=sinks)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all tokens as the queries of the last call see them, in left-padded coordinates ``[B, H, width, D]``.

        Costly: the history is dequantised at each call.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._check()
        return self._restored()

    def _restored(self) -> tuple[mx.array, mx.array]:
        starts = mx.array(self._window.starts, mx.int32)
        return self.backend.restore(self._history(), columns=self._padding.width, window_start=starts)

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:  # noqa: ARG002, N803  mlx-lm's names
        """Return the mask of the next ``N`` tokens, as mlx-lm's ``BatchKVCache`` does, so that it serves every layer."""
        mask: mx.array = create_causal_mask(N, offset=self._padding.width, left_padding=mx.array(self._padding.left), **kwargs)
        return mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a prompt: ``lengths`` tokens in each row and then ``right_padding``, or ``left_padding`` and then tokens.

        Raises:
            ValueError: left padding for a batch that has tokens, right padding without lengths, or not a number for each row.
        """
        self._padding.announce(left_padding, lengths, right_padding, empty=self.empty())

    def finalize(self) -> None:
        """End a prompt that was padded on the right: its padding is moved to the left."""
        self._settle()
        self._padding.end_prompt()

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep the rows ``batch_indices``, in that order, and no more padding than they need.

        Raises:
            ValueError: there is no row to keep.
        """
        self._settle()
        rows = [int(row) for row in batch_indices]
        if not rows:
            raise ValueError("no row to keep: let go of the batch instead")
        self._offsets = [self._offsets[row] for row in rows]
        for part in (self._padding, self._sinks, self._codes, self._window):
            part.keep(rows)

    def extend(self, other: BatchKIVICache) -> None:
        """Add the rows of ``other`` after one's own; ``other`` is used up.

        Raises:
            SpecError: it has another spec, or is no batch of packed caches.
            ValueError: it is of another model, or one of the two is in the middle of a padded prompt.
        """
        if not isinstance(other, BatchKIVICache):
            raise SpecError(f"{type(other).__name__}: a batch of packed caches is extended by a BatchKIVICache only")
        self._join([other])

    @classmethod
    def merge(cls, caches: Sequence[KIVICache]) -> Self:
        """Return a batch whose rows are ``caches``, empty or with history.

        Raises:
            SpecError: they are not all packed caches of one spec.
            ValueError: there is none, or they are of different models.
        """
        if not caches:
            raise ValueError("no cache to merge: a batch has at least one row")
        first, *others = [cls._of_one(cache) for cache in caches]
        first._join(others)
        return first

    def extract(self, idx: int) -> KIVICache:
        """Return row ``idx`` as a cache of its own.

        Raises:
            NonFiniteError: what was quantised, of any row, cannot be restored.
        """
        self._settle_checked()
        idx = range(len(self._offsets))[idx]
        if self._window.keys is None:
            empty = KIVICache(self.spec)
            empty.layer = self.layer
            return empty
        exact: Sequence[mx.array] = self._window.read([idx], self._window.starts[idx], self._window.stop)
        sinks: Sequence[mx.array] = self._sinks.row(idx)
        if self.spec.sink_length and not sinks:  # so short that all of it is sinks
            sinks, exact = exact, [part[..., :0, :] for part in exact]
        codes = self._codes.row(idx) or (None,) * len(CodeStore.AXES)
        arrays = dict(zip(STATE_ARRAYS, (*(sinks or (None, None)), *exact, *codes), strict=True))
        about = {"spec": self.spec.model_dump_json(), "layer": self.layer, "offset": self._offsets[idx]}
        return KIVICache.from_state({**about, **arrays})

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` columns of every row as :meth:`KIVICache.trim` does, and return how many were forgotten.

        Raises:
            ValueError: the batch is in the middle of a padded prompt, whose newest columns need not be tokens.
        """
        self._padding.require_whole_prompt("trimmed")
        n = max(0, min(self._padding.width, n))
        rows = [self.extract(row) for row in range(len(self._offsets))]
        for row in rows:
            row.trim(n)
        trimmed = self.merge(rows)
        self._padding.width -= n
        trimmed._padding = self._padding
        self.__dict__.update(vars(trimmed))
        return n

    def size(self) -> int:
        """Return the columns of the padded coordinates: the tokens of the longest row."""
        return self._padding.width

    def empty(self) -> bool:
        """Return whether no row has a token."""
        return self._window.keys is None

    @property
    def state(self) -> dict[str, Value]:
        """Lengths, padding and the live arrays, spare capacity included, for ``save_prompt_cache`` and ``mx.eval``.

        Raises:
            NonFiniteError: what was quantised cannot be restored.
        """
        self._settle_checked()
        arrays = (*self._sinks.slots, self._window.keys, self._window.values, *self._codes.slots)
        return {
            "spec": self.spec.model_dump_json(),
            "layer": self.layer,
            "width": self._padding.width,
            "offsets": list(self._offsets),
            "left_padding": list(self._padding.left),
            "right_padding": list(self._padding.right),
            "to_come": None if self._padding.to_come is None else list(self._padding.to_come),
            "sinks": list(self._sinks.counts),
            "codes": list(self._codes.counts),
            "starts": list(self._window.starts),
            "stop": self._window.stop,
            **dict(zip(STATE_ARRAYS, arrays, strict=True)),
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(self.from_state(state)))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Return the batch whose :attr:`state` this is, in arrays of its own.

        Raises:
            SpecError: the spec that was saved is not one of this version.
            BackendError: it names a backend that is not available here.
            ValueError: it is no state of a batch, or is damaged.
        """
        require_state(state, ("spec", "width", *LENGTHS, "to_come", "stop"))
        lengths = {name: list(state[name]) for name in LENGTHS}
        arrays = [None if state[name] is None else mx.array(state[name]) for name in STATE_ARRAYS]
        batch = cls(CacheSpec.from_json(state["spec"]), lengths["left_padding"])
        batch.layer = state.get("layer")  # files of earlier versions have none
        batch._offsets, batch._padding.right = lengths["offsets"], lengths["right_padding"]
        batch._padding.width = state["width"]
        batch._padding.to_come = None if state["to_come"] is None else list(state["to_come"])
        batch._sinks.restore(lengths["sinks"], arrays[:2])
        batch._codes.restore(lengths["codes"], arrays[4:])
        batch._window.starts, batch._window.stop = lengths["starts"], state["stop"]
        batch._window.keys, batch._window.values = arrays[2:4]
        if batch._codes.arrays:
            batch._check_later(batch._codes.arrays)
        held = [frontier + batch._window.count(row) for row, frontier in enumerate(batch.frontiers)]
        if held != batch._offsets:
            raise ValueError(f"offsets={batch._offsets}: the state's rows hold {held} tokens, so it is damaged; make it anew")
        return batch

    def bytes(self) -> CacheBytes:
        """Return what the rows weigh together; the capacity that shorter rows leave unused is ``spare``."""
        resident = self.nbytes
        if self._window.keys is None or self._window.values is None:
            return CacheBytes(resident=resident, full_precision=0)
        rows = len(self._offsets)
        quantized = sum(self._codes.counts)
        exact = sum(self._offsets) - quantized
        token = Token.of(self._window.keys, self._window.values)
        bill = functools.partial(packed_bytes, self.spec, token, rows=self._window.keys.shape[1], resident=resident)
        unused = bill(
            quantized=rows * self._codes.capacity - quantized,
            exact=rows * (self._sinks.capacity + self._window.capacity) - exact,
        )
        return bill(quantized=quantized, exact=exact, spare=unused.accounted)

    @property
    def nbytes(self) -> int:
        """Bytes of the live arrays."""
        self._settle_checked()
        return live_bytes(vars(self))

    @classmethod
    def _of_one(cls, cache: KIVICache) -> Self:
        """Return a batch of the one row ``cache``."""
        if type(cache) is not KIVICache:
            raise SpecError(f"{type(cache).__name__}: a batch of packed caches takes KIVICache rows only; start it anew")
        batch = cls(cache.spec, [0])
        batch.layer = cache.layer
        if cache.empty():
            return batch
        state: dict[str, Any] = cache.state
        sinks, exact, codes = ([state[name] for name in STATE_ARRAYS[part]] for part in (slice(2), slice(2, 4), slice(4, None)))
        if sinks[0] is not None and cache.offset < cache.spec.sink_length:
            sinks, exact = [None], sinks
        if sinks[0] is not None:
            batch._sinks.append([0], sinks)
        if codes[0] is not None:
            batch._codes.append([0], codes)
        batch._window.append(*exact)
        batch._offsets = [cache.offset]
        batch._padding.width = cache.offset
        return batch

    def _join(self, others: Sequence[BatchKIVICache]) -> None:
        batches = [self, *others]
        for batch in batches:
            if batch.spec != self.spec:
                raise SpecError(f"{batch.spec.slug}: cannot join a batch of {self.spec.slug}, one batch has one spec")
            batch._padding.require_whole_prompt("joined")
            batch._settle_checked()
        self._window.require_alike([batch._window for batch in others])
        self._offsets = [offset for batch in batches for offset in batch._offsets]
        self._padding.extend([batch._padding for batch in others])
        self._sinks.extend([batch._sinks for batch in others])
        self._codes.extend([batch._codes for batch in others])
        self._window.extend([batch._window for batch in others])

    def _frontier_of(self, offset: int) -> int:
        """Return the frontier of a row that was given ``offset`` tokens and never trimmed.

        As :class:`KIVICache`'s, but the sinks leave the window all at once: they are exact in either place.
        """
        sinks = self.spec.sink_length
        return 0 if offset < sinks else sinks + self.spec.quantized_tokens(offset)

    def _flush(self, offsets: Sequence[int], *, calls: int) -> None:
        """Move what leaves the window of each row, were it ``offsets[row]`` long, into sinks and codes.

        What was quantised is looked at once ``calls`` calls have gone by.
        """
        moves: dict[tuple[int, int, int], list[int]] = {}
        for row, (offset, frontier) in enumerate(zip(offsets, self.frontiers, strict=True)):
            target = self._frontier_of(offset)
            if target > frontier:
                moves.setdefault((self._window.starts[row], frontier, target), []).append(row)
        for (start, frontier, target), rows in moves.items():
            keys, values = self._window.read(rows, start, start + target - frontier)
            to_sinks = max(0, min(target, self.spec.sink_length) - frontier)
            if to_sinks:
                self._sinks.append(rows, (keys[..., :to_sinks, :], values[..., :to_sinks, :]))
            if target - frontier > to_sinks:
                quantized = quantize(self.backend, self.spec, keys[..., to_sinks:, :], values[..., to_sinks:, :])
                self._codes.append(rows, [*quantized.keys, *quantized.values])
                self._unchecked.add(quantized.unheld, calls=calls)
            for row in rows:
                self._window.starts[row] += target - frontier

    def _settle(self) -> None:
        """Bring every row to the state of its last token, once the call's queries are through."""
        if (moves := self._padding.align()) is not None:
            self._window.shift(moves)
        self._flush(self._offsets, calls=0)
        if self._window.capacity - self._window.longest > 2 * self.spec.group_size + MAX_CODE_QUERIES:
            self._window.make_room(0)

    def _codes_by_row(self) -> Iterator[tuple[int, int, Packed, Packed]]:
        for row, start in enumerate(self._sinks.counts):
            if codes := self._codes.row(row):
                yield row, start, Packed(*codes[:3]), Packed(*codes[3:])

    def _history(self) -> History:
        codes, sinks = self._codes.arrays, self._sinks.arrays
        window_keys, window_values = self._window.buffers()
        return History(
            key_bits=self.spec.key_bits,
            value_bits=self.spec.value_bits,
            group_size=self.spec.group_size,
            sink_keys=sinks[0] if sinks else None,
            sink_values=sinks[1] if sinks else None,
            keys=Packed(*codes[:3]) if codes else None,
            values=Packed(*codes[3:]) if codes else None,
            window_keys=window_keys,
            window_values=window_values,
            sink_count=mx.array(self._sinks.counts, mx.int32),
            code_count=mx.array(self._codes.counts, mx.int32),
            window_count=mx.array([self._window.stop] * len(self._offsets), mx.int32),
        )
