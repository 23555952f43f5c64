"""One cache a layer: what ``mlx_lm.models.cache.make_prompt_cache`` does, for a :class:`~kivi.spec.CacheSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from kivi.attention import AttentionError, hold_attention, install_attention, probe_attention, release_attention
from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.cache.single import KIVICache
from kivi.rotation import RotationError
from kivi.spec import CacheSpec, Kind, SpecError

MAKERS: dict[Kind, Callable[[CacheSpec], Any]] = {
    "kivi": KIVICache,
    "kivi-roundtrip": RoundTripKIVICache,
    "mlx-quantized": lambda spec: QuantizedKVCache(group_size=spec.group_size, bits=spec.key_bits),
}

Plan = Sequence[CacheSpec | None]  # what each layer gets; None where it keeps its own cache


class LayerSummary(NamedTuple):
    """Which layers of a prompt cache are quantised: their number, and the index and cache of every other layer."""

    quantized: int
    kept: dict[str, str]


def make_prompt_cache(model: Module, spec: CacheSpec) -> list[Any]:
    """Make the caches of ``spec`` for ``model``, for mlx-lm's ``prompt_cache=``.

    Layers whose own cache is an ordinary ``KVCache`` get the spec's. Sliding-window, recurrent and latent-attention layers
    keep theirs: :func:`describe_layers` lists them. A spec of kind ``kivi`` also binds the dispatch in the model's modules
    for the rest of the process (:mod:`kivi.attention`), where it is without effect on any other cache.

    Args:
        model: A model of mlx-lm. Neither it nor its ``make_cache`` is changed.
        spec: What to make; settings by layer count the entries of the model's own prompt cache.

    Returns:
        One new cache for each entry of the model's own prompt cache.

    Raises:
        AttentionError: No layer can take the cache, or the model computes attention where the codes would not be seen.
        SpecError: ``spec.layers`` names a layer that the model has not, or that keeps its own cache; or mlx-lm's quantised
            cache cannot hold as many numbers a head as the model has, in so many bits; or they cannot be rotated.
    """
    plan = _plan_layers(model, spec)
    if any(layer is not None and layer.kind == "kivi" for layer in plan):
        install_attention(model)
    return _make_caches(_own_make_cache(model), plan)


def describe_layers(caches: Iterable[Any]) -> LayerSummary:
    """Count the quantised layers of a prompt cache and list the others, index to class of the cache."""
    quantized = (KIVICache, RoundTripKIVICache, QuantizedKVCache)
    layers = list(enumerate(caches))
    kept = {str(index): type(cache).__name__ for index, cache in layers if not isinstance(cache, quantized)}
    return LayerSummary(len(layers) - len(kept), kept)


def install(model: Module, spec: CacheSpec) -> Installation:
    """Make ``model.make_cache`` return the caches of ``spec``.

    ``mlx_lm.server``, ``BatchGenerator``, ``generate`` and all that asks the model for its cache then gets these. Install a
    draft model for speculative decoding likewise. Installing again replaces the spec for caches that are made from then on:
    a server that keeps prompt caches must start that store anew, since one batch has one spec.

    Args:
        model: A model of mlx-lm.
        spec: As for :func:`make_prompt_cache`.

    Returns:
        A handle: ``undo`` it, or use it in a ``with`` statement, to have the model as it was.

    Raises:
        AttentionError: As :func:`make_prompt_cache`; the model is left as it was.
        SpecError: As :func:`make_prompt_cache`; the model is left as it was.
    """
    return Installation(model, spec)


class Installation(AbstractContextManager["Installation"]):
    """What :func:`install` changed, and the way back."""

    def __init__(self, model: Module, spec: CacheSpec) -> None:
        self._override = _MakeCache(_own_make_cache(model), _plan_layers(model, spec))
        self._model = model
        self._replaced = vars(model).get("make_cache")
        self._modules = hold_attention(model)
        self._undone = False
        model.make_cache = self._override

    def undo(self) -> None:
        """Give the model back the ``make_cache`` that it had; a second call does nothing.

        Raises:
            RuntimeError: ``make_cache`` was replaced again in the meantime.
        """
        if self._undone:
            return
        if vars(self._model).get("make_cache") is not self._override:
            raise RuntimeError("make_cache was replaced after this installation: undo the newer one first")
        del self._model.make_cache
        if self._replaced is not None:
            self._model.make_cache = self._replaced
        release_attention(self._modules)
        self._undone = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.undo()


class _MakeCache:
    """What stands in for a model's ``make_cache``; the model's own is kept beside it."""

    def __init__(self, own: Callable[[], list[Any]], plan: Plan) -> None:
        self.own = own
        self.plan = plan

    def __call__(self) -> list[Any]:
        return _make_caches(self.own, self.plan)


def _own_make_cache(model: Module) -> Callable[[], list[Any]]:
    """Return what makes the model's own caches, also where :func:`install` has replaced it."""
    make_cache: Callable[[], list[Any]] | None = getattr(model, "make_cache", None)
    if isinstance(make_cache, _MakeCache):
        return make_cache.own
    return make_cache or (lambda: [KVCache() for _ in model.layers])


def _make_caches(own: Callable[[], list[Any]], plan: Plan) -> list[Any]:
    caches = [cache if spec is None else MAKERS[spec.kind](spec) for cache, spec in zip(own(), plan, strict=True)]
    for layer, cache in enumerate(caches):
        if isinstance(cache, KIVICache | RoundTripKIVICache):
            cache.layer = layer
    return caches


def _plan_layers(model: Module, spec: CacheSpec) -> Plan:
    CacheSpec.required(spec)
    own = _own_make_cache(model)()
    wanted = [spec.for_layer(index, len(own)) for index in range(len(own))]
    able = {index for index, cache in enumerate(own) if type(cache) is KVCache}
    on_codes = {index for index in able if wanted[index].kind == "kivi"}
    if on_codes:
        _require_one_machine(model)
        able -= _unable_layers(model, own, on_codes)
    if not able and spec.kind != "full":
        kinds = ", ".join(sorted({type(cache).__name__ for cache in own}))
        raise AttentionError(
            f"{_name(model)}: no layer attends to keys and values of its own as they are in an ordinary cache, its caches are "
            f"{kinds}; use kind full"
        )
    for index in sorted({named % len(own) for named in spec.layers} - able):
        if wanted[index].kind != "full":
            raise SpecError(f"layers[{index}]: this layer of {_name(model)} keeps its own {type(own[index]).__name__}")
    if spec.kind == "mlx-quantized":
        for dim in sorted({array.shape[-1] for pair in _held(model, able).values() for array in pair}):
            _require_whole_words(_name(model), dim, spec)
    if rotated := {index for index in able if wanted[index].rotate != "none"}:
        for index, pair in _held(model, rotated).items():
            _require_rotation(_name(model), wanted[index], pair)
    return [layer if index in able and layer.kind != "full" else None for index, layer in enumerate(wanted)]


def _require_one_machine(model: Module) -> None:
    """Refuse a pipeline over several machines: its models hand on the arrays that an ordinary cache holds."""
    if any(getattr(module, "pipeline_size", 1) > 1 for module in model.modules()):  # type: ignore[no-untyped-call]
        raise AttentionError(f"{_name(model)}: its layers are spread over several machines, which wants kind full")


def _held(model: Module, layers: set[int]) -> dict[int, tuple[mx.array, mx.array]]:
    """Return keys and values that ``layers`` have of two tokens, for their shapes; nothing is evaluated."""
    own = _own_make_cache(model)()
    model(mx.array([[0, 0]]), cache=own)
    return {index: (own[index].keys, own[index].values) for index in sorted(layers) if own[index].keys is not None}


def _require_rotation(name: str, spec: CacheSpec, pair: tuple[mx.array, mx.array]) -> None:
    """Refuse keys or values that are to be rotated and cannot be.

    Raises:
        SpecError: they have a number of channels without a rotation.
    """
    for array, codec in zip(pair, spec.codecs, strict=True):
        try:
            codec.require_channels(array.shape[-1])
        except RotationError as error:
            raise SpecError(f"rotate={spec.rotate} on {name}: {error}") from None


def _require_whole_words(name: str, dim: int, spec: CacheSpec) -> None:
    """Refuse ``dim`` numbers a head that mlx-lm's quantised cache makes room for otherwise than MLX packs them.

    It counts on ``32 // bits`` codes in a word of 32 bits, where MLX lets codes of 3, 5 and 6 bits cross words.

    Raises:
        SpecError: the two differ, or a group is no divisor.
    """
    bits = spec.key_bits
    if dim % spec.group_size:
        raise SpecError(
            f"group_size={spec.group_size}: {name} has {dim} numbers a head, which mlx-lm cannot divide into groups"
        )
    if dim // (32 // bits) != dim * bits // 32:
        raise SpecError(
            f"key_bits={bits}: mlx-lm's quantised cache cannot hold the {dim} numbers a head of {name}; use 2, 4 or 8 bits"
        )


def _unable_layers(model: Module, own: Sequence[Any], layers: set[int]) -> set[int]:
    """Return which of ``layers`` must keep their own cache; refuse a model where one would attend to too little."""
    verdicts = probe_attention(model, own)
    bypassing = sorted(index for index in layers if verdicts[index] == "not called")
    if bypassing:
        raise AttentionError(
            f"{_name(model)}: layers {', '.join(map(str, bypassing))} compute attention without mlx-lm's "
            "scaled_dot_product_attention, so they would not see packed codes; use kind kivi-roundtrip or full"
        )
    return {index for index in layers if verdicts[index] in {"transformed", "shared"}}


def _name(model: Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__))
