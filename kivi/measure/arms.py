"""The caches that a measurement runs: made for a spec, fed call by call, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from kivi.build import describe_layers, make_prompt_cache
from kivi.cache.single import DequantizedKIVICache, KIVICache
from kivi.measure import MeasureError
from kivi.measure.schedule import GRID, cut_calls, prefill_call
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

FULL = CacheSpec(kind="full")


class Arm:
    """One model with one kind of cache, for as long as one batch of sequences lasts.

    Args:
        model: The model.
        spec: What caches it gets.
        control: Give layers of kind ``kivi`` the control cache: the same codes, dequantised for standard attention.
    """

    def __init__(self, model: LoadedModel, spec: CacheSpec, *, control: bool = False) -> None:
        self.spec = spec
        self.caches = make_prompt_cache(model.model, spec)
        self.kept = describe_layers(self.caches).kept if spec.kind != "full" else {}
        self.layers = quantized_layers(self.caches, spec)
        if control:
            self.caches = [_control(cache) for cache in self.caches]
        self._model = model.model
        self._position = 0

    def score(self, tokens: Sequence[int], stop: int) -> mx.array:
        """Feed the tokens up to position ``stop``; return their logits ``[positions, vocabulary]`` in float32.

        Packed caches attend on their codes in all of these calls, though they are longer than those of decoding.
        """
        for cache in self.caches:
            if type(cache) is KIVICache:
                cache.max_code_queries = GRID
        return self.feed(tokens, cut_calls(self.layers, self._position, stop))

    def feed(self, tokens: Sequence[int], calls: Iterable[tuple[int, int]]) -> mx.array:
        """Feed the tokens of ``calls``, each a start and a stop; return as :meth:`score`."""
        parts = []
        for start, self._position in calls:
            logits = self._model(batch([tokens[start : self._position]]), cache=self.caches)[0].astype(mx.float32)
            mx.eval(logits)
            parts.append(logits)
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def prefill(self, prompts: mx.array) -> mx.array:
        """Feed prompts ``[B, context]`` as mlx-lm does; return the logits ``[B, vocabulary]`` that predict the next token.

        All tokens but the last go in calls of which only the caches are evaluated, so that nothing is projected onto
        the vocabulary in vain. At the end no cache holds unevaluated work. mlx-lm's quantised caches are full ones during the
        first call and are quantised after it, as in ``mlx_lm.generate.generate_step``.
        """
        context = prompts.shape[1]
        longest = prefill_call(self.layers)
        for begin in range(0, context - 1, longest):
            caches = [_unquantized(cache) for cache in self.caches]
            self._model(prompts[:, begin : min(begin + longest, context - 1)], cache=caches)
            self.caches = [_quantized(cache, wanted) for cache, wanted in zip(caches, self.caches, strict=True)]
            settle(self.caches)
        logits = self.decode(prompts[:, -1:])
        settle(self.caches)
        return logits

    def decode(self, tokens: mx.array, caches: Sequence[Any] | None = None) -> mx.array:
        """Feed one token a row, ``[B, 1]``, to the arm's caches or to copies; return evaluated logits ``[B, vocabulary]``."""
        logits = self.step(tokens, caches)
        mx.eval(logits)
        return logits

    def step(self, tokens: mx.array, caches: Sequence[Any] | None = None) -> mx.array:
        """Do as :meth:`decode` and leave the logits unevaluated."""
        logits: mx.array = self._model(tokens, cache=self.caches if caches is None else caches)[:, -1]
        return logits

    def check_finite(self) -> None:
        """Look for NaN and infinity in what the caches hold.

        Raises:
            NonFiniteError: a KIVI cache found some; it names layer and token.
            MeasureError: another cache holds some; it names the layer.
        """
        for layer, cache in enumerate(self.caches):
            if hasattr(cache, "check_finite"):
                cache.check_finite(layer)
            elif not all_finite(held_arrays(cache)):
                raise MeasureError(f"layer {layer}: NaN or infinity in its {type(cache).__name__}; look at weights and dtype")


def batch(rows: Sequence[Sequence[int]]) -> mx.array:
    """Return rows of tokens of equal length as one array ``[B, length]``."""
    return mx.array([list(row) for row in rows])


def quantized_layers(caches: Sequence[Any], spec: CacheSpec) -> list[CacheSpec]:
    """Return the specs of the layers that quantise; layers that keep their own cache, and full ones, are left out."""
    kept = describe_layers(caches).kept
    return [spec.for_layer(index, len(caches)) for index in range(len(caches)) if str(index) not in kept]


def settle(caches: Iterable[Any]) -> None:
    """Evaluate everything that ``caches`` hold, so that no work is left for a later call, or a later clock."""
    mx.eval([cache.state for cache in caches])  # a packed cache quantises what is due when asked for its state
    mx.eval(list(held_arrays(caches)))


def unpin_states(caches: Iterable[Any]) -> None:
    """Give the caches of recurrent layers arrays of their own: what mlx-lm leaves there may be views, which pin larger ones."""
    for cache in caches:
        if isinstance(cache, CacheList):
            unpin_states(cache.caches)
        elif isinstance(cache, ArraysCache):
            cache.cache = [None if array is None else array + mx.array(0, array.dtype) for array in cache.cache]
            mx.eval(cache.cache)


def held_arrays(holder: Any) -> Iterator[mx.array]:
    """Yield each MLX array that ``holder`` keeps alive through attributes and containers, once.

    It goes by what is there, not by what a cache says of itself. Models and whatever else is no part of a cache are left out.
    """
    yield from _walk(holder, set())


def _walk(holder: Any, seen: set[int]) -> Iterator[mx.array]:
    if id(holder) in seen or isinstance(holder, str | bytes | int | float | type | Module | CacheSpec):
        return
    seen.add(id(holder))
    if isinstance(holder, mx.array):
        yield holder
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from _walk(part, seen)
    elif isinstance(holder, list | tuple | set | frozenset):
        for part in holder:
            yield from _walk(part, seen)
    elif hasattr(holder, "__dict__") and not callable(holder):
        yield from _walk(vars(holder), seen)


def all_finite(arrays: Iterable[mx.array]) -> bool:
    """Return whether no floating-point array of ``arrays`` holds NaN or infinity."""
    flags = [mx.all(mx.isfinite(array)) for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    return not flags or bool(mx.all(mx.stack(flags)))


def _unquantized(cache: Any) -> Any:
    return KVCache() if type(cache) is QuantizedKVCache and cache.empty() else cache


def _quantized(cache: Any, wanted: Any) -> Any:
    return cache if type(cache) is type(wanted) else cache.to_quantized(group_size=wanted.group_size, bits=wanted.bits)


def _control(cache: Any) -> Any:
    if type(cache) is not KIVICache:
        return cache
    control = DequantizedKIVICache(cache.spec)
    control.layer = cache.layer
    return control
