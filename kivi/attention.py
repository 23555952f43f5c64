"""How mlx-lm's attention is made to run on packed codes, in one place.

Every model of mlx-lm imports ``scaled_dot_product_attention`` by name from ``mlx_lm.models.base`` into its own module and
hands it the layer's cache. In the modules of one given model, and nowhere else, that name is bound to
:func:`scaled_dot_product_attention` below: a cache that has ``attend`` is asked for the result, any other goes to mlx-lm's
function. So models without packed caches compute what they always did, in the same process and at the same time.

Whether a model's attention really comes by is found out by :func:`probe_attention`, which runs the model's own code on
caches that take notes. MLX is lazy and nothing of that run is evaluated, so it costs a few milliseconds whatever the size of
the model.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

NAME = "scaled_dot_product_attention"
MLX_LM_ATTENTION = base.scaled_dot_product_attention
MLX_LM_MODELS = "mlx_lm.models."

Verdict = Literal["on codes", "not called", "transformed", "shared"]

_lock = threading.RLock()
_holders: Counter[ModuleType] = Counter()  # how many ask for the dispatch in a module
_installed: set[ModuleType] = set()  # modules that install_attention holds for good
_probing = threading.local()  # `probes`: those of the model that this thread tries out


class AttentionError(ValueError):
    """A model that cannot take a packed cache; the message is one sentence that says why and what to do."""


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as ``mlx_lm.models.base.scaled_dot_product_attention`` does, on the cache's codes if it has any.

    Args:
        queries: ``[B, H_q, L, D_k]``.
        keys: What the cache's ``update_and_fetch`` returned. A cache with ``attend`` knows them already.
        values: As ``keys``.
        cache: The layer's cache, or None.
        scale: Factor of the scores.
        mask: ``"causal"``, boolean, additive, or None.
        sinks: Attention sinks, one logit a query head.

    Returns:
        ``[B, H_q, L, D_v]`` in the dtype of the queries.
    """
    if hasattr(cache, "attend"):
        attended: mx.array = cache.attend(queries, scale=scale, mask=mask, sinks=sinks)
        return attended
    for probe in getattr(_probing, "probes", ()):
        if probe is not cache and probe.gave(keys, values):
            probe.shared = True
    if isinstance(cache, _Probe):
        return cache.note(queries, keys, values)
    full: mx.array = MLX_LM_ATTENTION(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return full


def install_attention(model: Module) -> None:
    """Bind the dispatch in the modules of ``model`` for the rest of the process; calling it again changes nothing."""
    with _lock:
        new = attention_modules(model) - _installed
        _hold(new)
        _installed.update(new)


@contextmanager
def attention_installed(model: Module) -> Iterator[None]:
    """Bind the dispatch in the modules of ``model`` while the block runs.

    Blocks nest and overlap, in one thread or in several: the last to end gives mlx-lm's function back, unless
    :func:`install_attention` was called for the module. Packed caches must not be used after it:
    :func:`require_dispatch` stops those that are.
    """
    modules = hold_attention(model)
    try:
        yield
    finally:
        release_attention(modules)


def hold_attention(model: Module) -> set[ModuleType]:
    """Bind the dispatch in the modules of ``model`` until :func:`release_attention` is called with what this returns."""
    modules = attention_modules(model)
    _hold(modules)
    return modules


def release_attention(modules: Iterable[ModuleType]) -> None:
    """End one :func:`hold_attention`."""
    with _lock:
        for module in modules:
            _holders[module] -= 1
            if not _holders[module]:
                del _holders[module]
                setattr(module, NAME, MLX_LM_ATTENTION)


def _hold(modules: Iterable[ModuleType]) -> None:
    with _lock:
        for module in modules:
            _holders[module] += 1
            setattr(module, NAME, scaled_dot_product_attention)


def attention_modules(model: Module) -> set[ModuleType]:
    """Return the modules that define the layers of ``model`` and hold mlx-lm's attention, or ours in its place, by name."""
    layers = model.modules()  # type: ignore[no-untyped-call]
    classes = {ancestor for layer in layers for ancestor in type(layer).__mro__}
    modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    ours = (MLX_LM_ATTENTION, scaled_dot_product_attention)
    return {module for module in modules - {base, sys.modules[__name__]} if getattr(module, NAME, None) in ours}


def require_dispatch(caller: dict[str, Any]) -> None:
    """Stop a packed cache that a model of mlx-lm uses without the dispatch.

    Args:
        caller: Globals of the function that called the cache's ``update_and_fetch``.

    Raises:
        AttentionError: They are those of a module of mlx-lm that would attend to the tokens of the call alone.
    """
    if caller.get(NAME) is scaled_dot_product_attention:
        return
    module = str(caller.get("__name__", ""))
    if module.startswith(MLX_LM_MODELS):
        raise AttentionError(
            f"{module} does not attend through kivi: make its caches with kivi.make_prompt_cache(model, spec) or, for caches "
            "that were loaded, call kivi.install(model, spec) first"
        )


class _Probe(KVCache):  # type: ignore[misc]  # mlx_lm is untyped
    """A cache that stores nothing and notes what a layer's attention does with what it gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[mx.array, mx.array] | None = None
        self.lent: tuple[mx.array, mx.array] | None = None
        self.updates = 0
        self.calls = 0
        self.unchanged = True
        self.shared = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[-2]
        self.given = keys, values
        self.updates += 1
        return self.given

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Layers that share another's tokens call this; a packed cache gives them all it has, attend as they may."""
        if self.given is None:
            raise AttentionError("a layer of this model reads the tokens of another before they are there; use kind full")
        self.lent = mx.array(self.given[0]), mx.array(self.given[1])
        return self.lent

    def gave(self, keys: mx.array, values: mx.array) -> bool:
        """Return whether one of these is what ``update_and_fetch`` returned: of a packed cache, a call's tokens alone."""
        return self.given is not None and (keys is self.given[0] or values is self.given[1])

    def note(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        self.calls += 1
        self.unchanged &= any(pair is not None and keys is pair[0] and values is pair[1] for pair in (self.given, self.lent))
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)

    @property
    def verdict(self) -> Verdict:
        if self.calls < self.updates or not self.calls:
            return "not called"
        if self.shared:
            return "shared"
        return "on codes" if self.unchanged else "transformed"


def probe_attention(model: Module, caches: Sequence[Any]) -> dict[int, Verdict]:
    """Find out how each layer with an ordinary ``KVCache`` attends, with the dispatch installed.

    The model's code runs on two tokens and then on one, since some attend differently when they decode. Its weights are
    read, never evaluated or changed.

    Args:
        model: A model of mlx-lm.
        caches: Its own new caches, one a layer; those of the other layers are used up.

    Returns:
        For the index of each layer whose cache is exactly a ``KVCache``: ``"on codes"`` if its attention hands the cache's
        keys and values to the dispatch as they were fetched, ``"transformed"`` if it changes them before (multi-head latent
        attention), ``"shared"`` if another layer attends to them without the cache, ``"not called"`` if it computes attention
        by itself.
    """
    probed = [_Probe() if type(cache) is KVCache else cache for cache in caches]
    _probing.probes = [cache for cache in probed if isinstance(cache, _Probe)]
    try:
        with attention_installed(model):
            for tokens in ([[0, 0]], [[0]]):
                model(mx.array(tokens), cache=probed)
    finally:
        _probing.probes = []
    return {index: cache.verdict for index, cache in enumerate(probed) if isinstance(cache, _Probe)}
