"""BatchKIVICache: packed sequences of different lengths side by side, in the protocol of mlx-lm's batch generator.

mlx-lm pads the shorter sequences of a batch on the left and makes one mask for all layers in those padded coordinates. Here
padding takes no part: the codes of a row begin at the row's own position 0 and its window ends with its newest token
(:mod:`kivi.cache.rows`), so its groups are those of the sequence alone, whatever its neighbours do::

    row 0   | sinks | codes codes codes codes |     spare |      window |
    row 1   | sinks | codes codes |                 spare |  window     |
                                                                         the newest token of every row
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from kivi.cache.masks import default_mask, in_storage_order
from kivi.cache.packed import MAX_CODE_QUERIES, SHORT_CALL, PackedCache, Tokens
from kivi.cache.padding import Padding
from kivi.cache.rows import CodeRows, RowWindow, SinkRows
from kivi.cache.single import KIVICache
from kivi.cache.state import STATE_ARRAYS, Value, loadable, require_state
from kivi.codec import Packed
from kivi.spec import CacheSpec, SpecError

LENGTHS = ("offsets", "left_padding", "right_padding", "sinks", "codes", "starts")  # of a state, a number a row


@loadable
class BatchKIVICache(PackedCache):
    """A packed KV cache of one layer for sequences of different lengths.

    Given the same keys and values, the codes of a row equal those of a :class:`~kivi.cache.single.KIVICache` of that
    sequence alone bit for bit, and its queries see the same tokens quantised. Lengths are Python integers: no step waits for
    an array.

    Args:
        spec: A spec with ``kind="kivi"``, without settings by layer.
        left_padding: For each row, how many columns of the tokens to come are padding, as for mlx-lm's ``BatchKVCache``.
    """

    def __init__(self, spec: CacheSpec, left_padding: Sequence[int]) -> None:
        super().__init__(spec)
        rows = len(left_padding)
        self._offsets = [0] * rows  # tokens of each row
        self._taken: list[int] = []  # tokens of each row in the last call, until it is settled
        self._padding = Padding(left_padding)
        self._sinks: SinkRows = SinkRows(spec.sink_length, rows)
        self._codes: CodeRows = CodeRows(self._codecs, rows)
        self._window: RowWindow = RowWindow(rows, slack=spec.group_size)

    @property
    def offset(self) -> mx.array:
        """Position of the next token of each row, int32 ``[B]``, for rotary embeddings; negative in left padding."""
        return self._padding.offset

    @property
    def frontiers(self) -> list[int]:
        """Position of each row up to which tokens are sinks or quantised."""
        return [sinks + codes for sinks, codes in zip(self._sinks.counts, self._codes.counts, strict=True)]

    def _restore(self) -> tuple[mx.array, mx.array]:
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
        self._settle_and_check()
        return self._row(range(len(self._offsets))[idx])

    def _row(self, idx: int) -> KIVICache:
        """Return row ``idx`` as it is: what is due is not quantised first."""
        if self._window.keys is None:
            empty = KIVICache(self.spec)
            empty.layer = self.layer
            return empty
        exact: Sequence[mx.array] = self._window.read([idx], self._window.starts[idx], self._window.stop)
        sinks: Sequence[mx.array] = self._sinks.row(idx)
        if self.spec.sink_length and not sinks:  # so short that all of it is sinks
            sinks, exact = exact, [part[..., :0, :] for part in exact]
        codes = self._codes.row(idx) or (None,) * len(self._codes.axes)
        arrays = dict(zip(STATE_ARRAYS, (*(sinks or (None, None)), *exact, *codes), strict=True))
        about = {"spec": self.spec.model_dump_json(), "layer": self.layer, "offset": self._offsets[idx]}
        return KIVICache.from_state({**about, **arrays})

    def trim(self, n: int) -> int:
        """Forget the newest ``n`` columns of every row as :meth:`KIVICache.trim` does, and return how many were forgotten.

        A row that loses all its tokens is an empty one: its next token is its first, where mlx-lm's ``BatchKVCache`` takes what
        comes next for padding.

        Raises:
            ValueError: the batch is in the middle of a padded prompt, whose newest columns need not be tokens.
        """
        self._padding.require_whole_prompt("trimmed")
        n = max(0, min(self._padding.width, n))
        self._check()
        rows = [self._row(row) for row in range(len(self._offsets))]
        for row in rows:
            row.trim(n)  # only then is quantised what is due: what the last call brought may be among what is forgotten
        trimmed = self.merge(rows)
        self._padding.trim(n)
        trimmed._padding = self._padding
        self.__dict__.update(vars(trimmed))
        return n

    def size(self) -> int:
        return self._padding.width

    def empty(self) -> bool:
        """Return whether no row has a token."""
        return self._window.keys is None

    def _state(self) -> dict[str, Value]:
        """Return lengths, padding and the live arrays, spare capacity included."""
        arrays = (*self._sinks.slots, self._window.keys, self._window.values, *self._codes.slots)
        return {
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
        batch.layer = state.get("layer")  # states of version 0.1.0 have none
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
            batch._settle_and_check()
        self._window.require_alike([batch._window for batch in others])
        self._offsets = [offset for batch in batches for offset in batch._offsets]
        self._padding.extend([batch._padding for batch in others])
        self._sinks.extend([batch._sinks for batch in others])
        self._codes.extend([batch._codes for batch in others])
        self._window.extend([batch._window for batch in others])

    def _store(self, keys: mx.array, values: mx.array) -> None:
        if keys.shape[0] != len(self._offsets):
            raise ValueError(f"keys {keys.shape}: this batch has {len(self._offsets)} rows")
        self._settle()
        if self._unchecked.waiting:
            self._check_due()
        skipped, self._taken = self._padding.take(keys.shape[-2])
        self._window.append(keys, values)
        self._window.starts = [start + skip for start, skip in zip(self._window.starts, skipped, strict=True)]
        # What the first query of each row would see quantised if its tokens came one at a time.
        first = [offset + min(1, count) for offset, count in zip(self._offsets, self._taken, strict=True)]
        self._flush(first, calls=1 if keys.shape[-2] == 1 else 0)
        self._offsets = [offset + count for offset, count in zip(self._offsets, self._taken, strict=True)]

    def _seen(self, query: int) -> list[int]:
        """Return the tokens of each row that decide what is quantised for the last call's query in column ``query``.

        A row that the call began with padding has too few tokens for a group in a short call.
        """
        seen = []
        for offset, taken in zip(self._offsets, self._taken, strict=True):
            seen.append(offset - taken + min(query + 1 if taken <= SHORT_CALL else 1, taken))
        return seen

    def _cuts(self, length: int) -> list[int]:  # noqa: ARG002
        cuts = set[int]()
        for offset, taken, quantized in zip(self._offsets, self._taken, self._codes.counts, strict=False):
            cuts.update(self._cuts_of_row(offset - taken, taken, quantized))
        return sorted(cuts)

    def _flush_for(self, query: int, length: int) -> None:  # noqa: ARG002
        self._flush(self._seen(query))

    def _frontier_of(self, offset: int) -> int:
        """Return the frontier of a row that was given ``offset`` tokens and never trimmed.

        As :class:`KIVICache`'s, but the sinks leave the window all at once: they are exact in either place.
        """
        sinks = self.spec.sink_length
        return 0 if offset < sinks else sinks + self.spec.quantized_tokens(offset)

    def _flush(self, offsets: Sequence[int], calls: int = 0) -> None:
        """Move what leaves the window of each row, were it ``offsets[row]`` long, into sinks and codes.

        What was quantised is looked at once ``calls`` more calls have gone by.
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
                packed_keys, packed_values = self._quantize(keys[..., to_sinks:, :], values[..., to_sinks:, :], calls)
                self._codes.append(rows, (*packed_keys, *packed_values))
            for row in rows:
                self._window.starts[row] += target - frontier

    def _settle(self) -> None:
        if (moves := self._padding.align()) is not None:
            self._window.shift(moves)
        self._flush(self._offsets)
        self._taken = []
        if self._window.capacity - self._window.longest > 2 * self.spec.group_size + MAX_CODE_QUERIES:
            self._window.make_room(0)

    def _codes_by_row(self) -> Iterator[tuple[int, int, Packed, Packed]]:
        for row, start in enumerate(self._sinks.counts):
            if codes := self._codes.row(row):
                yield row, start, Packed(*codes[:3]), Packed(*codes[3:])

    def _held(self) -> Tokens:
        quantized = sum(self._codes.counts)
        return Tokens(quantized, sum(self._offsets) - quantized)

    def _counts(self) -> tuple[mx.array, mx.array, mx.array]:
        stops = [self._window.stop] * len(self._offsets)
        sinks, codes, window = (mx.array(counts, mx.int32) for counts in (self._sinks.counts, self._codes.counts, stops))
        return sinks, codes, window

    def _mask_of_call(self, mask: mx.array | str | None, length: int) -> mx.array:
        if mask is None or isinstance(mask, str):
            return default_mask(length, self._padding, causal=mask is not None)
        return mask

    def _in_storage_order(self, mask: mx.array) -> mx.array:
        stored = self._sinks.capacity + self._codes.capacity
        return in_storage_order(mask, self._padding, stored=stored, window=self._window)


KIVICache.batch_class = BatchKIVICache
