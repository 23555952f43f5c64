"""What fits into memory: weights, cache, and the peak of a prefill, without running the model and from its config alone.

Weights and cache are exact (:mod:`kivi.models.skeleton`, :mod:`kivi.footprint`). The peak is an estimate for the prefill of
``mlx_lm.generate``, in calls of 2,048 tokens: weights, cache after the call, and what a layer works with meanwhile::

    scores       query heads * tokens of the call * columns, where attention is not fused
    restored     keys and values of all columns in full precision, where the history is packed
    activations  tokens of the call * (outputs of the layer's projections + 5 * hidden + 6 * query heads * head dim)

each times sequences and bytes of a number. The factors 5 and 6 count norms, residuals, rope and transposes that MLX, which
starts operations ahead of those that run, has allocated at once; they were fitted to its peaks on a CPU, for llamas of several
widths. Attention is fused on a GPU for head dims of 64, 80 and 128, mlx-lm's quantised cache excepted.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache
from mlx_lm.models.switch_layers import SwitchLinear
from pydantic import BaseModel, ConfigDict, Field

from kivi.attention import AttentionError
from kivi.build import make_prompt_cache
from kivi.cache.single import KIVICache
from kivi.footprint import FootprintError, KeyValues, layer_bytes, prefill_calls
from kivi.models.skeleton import SkeletonDtype, build_skeleton
from kivi.spec import MAX_TOKENS, CacheSpec, SpecError

FUSED_HEAD_DIMS = (64, 80, 128)  # MLX's full attention kernels
HIDDEN_BUFFERS, QUERY_BUFFERS = 5, 6
USUAL_CONTEXT = 32_768
UNITS = ("", "K", "M", "G", "T")
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Device = Literal["cpu", "gpu"]


class FitError(ValueError):
    """A question that has no answer; the message is one sentence with the numbers."""


class FitRow(BaseModel):
    """What one cache takes at the context, and how far it goes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: CacheSpec
    cache_bytes: int = Field(description="bytes of the cache after a prompt as long as the context; exact")
    bytes_per_token: float = Field(description="the same, a token of one sequence")
    peak_bytes: int = Field(description="peak of the prompt's prefill, weights included; estimated")
    fits: bool = Field(description="whether the peak is within the memory")
    longest_context: int = Field(description="tokens a sequence up to which it is; 0: none")


class Fit(BaseModel):
    """The answer: the model's weights, and a row for each cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    memory_bytes: int
    weight_bytes: int = Field(description="bytes of the weights; exact")
    context: int = Field(description="tokens a sequence")
    model_context: int | None = Field(description="the longest context that the model's config names")
    batch: int = Field(description="sequences")
    device: Device
    rows: list[FitRow]
    refused: dict[str, str] = Field(description="texts of the specs that the model cannot take, and why")


def fit(
    name: str,
    memory: int,
    specs: Sequence[CacheSpec],
    *,
    context: int | None = None,
    batch: int = 1,
    revision: str | None = None,
    dtype: SkeletonDtype = "stored",
    device: Device | None = None,
) -> Fit:
    """Say what fits.

    Args:
        name: ``embedded``, a folder in mlx-lm's form, or a Hugging Face id, of which the config alone is downloaded.
        memory: Bytes that MLX may use.
        specs: Caches, a row each.
        context: Tokens a sequence; the model's longest or 32,768 by default, whichever is less.
        batch: Sequences of equal length, prefilled together.
        revision: Of a Hugging Face id.
        dtype: As for :func:`kivi.models.skeleton.build_skeleton`.
        device: Where the model is to run; this machine's device by default.

    Raises:
        FitError: the memory is less than the weights, or the config does not tell enough.
        ModelError: the model cannot be built.
    """
    sizes = Sizes(name, revision=revision, dtype=dtype, device=device)
    if memory < sizes.weight_bytes:
        raise FitError(f"memory={show_bytes(memory)}: the weights of {name} alone take {show_bytes(sizes.weight_bytes)}")
    tokens = context or min(USUAL_CONTEXT, sizes.context or USUAL_CONTEXT)
    rows, refused = [], {}
    for spec in specs:
        try:
            rows.append(_row(sizes, spec, memory, tokens, batch))
        except (AttentionError, SpecError) as error:
            refused[spec.text] = str(error)
    return Fit(
        model=name,
        memory_bytes=memory,
        weight_bytes=sizes.weight_bytes,
        context=tokens,
        model_context=sizes.context,
        batch=batch,
        device=sizes.device,
        rows=rows,
        refused=refused,
    )


def _row(sizes: Sizes, spec: CacheSpec, memory: int, tokens: int, batch: int) -> FitRow:
    cache, peak = sizes.cache_bytes(spec, tokens, batch), sizes.peak_bytes(spec, tokens, batch)
    return FitRow(
        spec=spec,
        cache_bytes=cache,
        bytes_per_token=cache / tokens / batch,
        peak_bytes=peak,
        fits=peak <= memory,
        longest_context=sizes.longest_context(spec, memory, batch),
    )


class Sizes:
    """The bytes of one model with any cache."""

    def __init__(
        self, name: str, *, revision: str | None = None, dtype: SkeletonDtype = "stored", device: Device | None = None
    ) -> None:
        skeleton = build_skeleton(name, revision=revision, dtype=dtype)
        self.device: Device = device or ("gpu" if mx.default_device() == mx.gpu else "cpu")
        self.weight_bytes = skeleton.weight_bytes
        self._model = skeleton.model
        self._config = {**skeleton.config, **skeleton.config.get("text_config", {})}
        self._name = name
        self._own = make_prompt_cache(self._model, CacheSpec(kind="full"))
        logits: mx.array = self._model(mx.array([[0, 0]]), cache=self._own)
        self._itemsize = logits.itemsize
        self._given = [KeyValues.held(cache) for cache in self._own]
        self._heads = self._number("num_attention_heads", "num_heads", "n_heads", "n_head") if any(self._given) else 0
        plain = build_skeleton(name, revision=revision).model
        self._activations = self._numbers_a_token(plain)
        longest = self._config.get("max_position_embeddings")
        self.context: int | None = longest if isinstance(longest, int) else None

    def cache_bytes(self, spec: CacheSpec, tokens: int, batch: int = 1) -> int:
        """Return the resident bytes of all layers after a prompt of ``tokens``; exact.

        Raises:
            AttentionError, SpecError: the model cannot take the cache.
            FitError: a layer keeps a cache whose bytes cannot be told.
        """
        return self._resident(make_prompt_cache(self._model, spec), prefill_calls(tokens), batch)

    def peak_bytes(self, spec: CacheSpec, tokens: int, batch: int = 1) -> int:
        """Return the estimated peak of MLX's memory while a prompt of ``tokens`` is prefilled, weights included.

        Raises:
            AttentionError, FitError, SpecError: as :meth:`cache_bytes`.
        """
        return self._peak(make_prompt_cache(self._model, spec), tokens, batch)

    def longest_context(self, spec: CacheSpec, memory: int, batch: int = 1) -> int:
        """Return the most tokens a sequence whose peak is within ``memory``; at most what the model's config names.

        Raises:
            AttentionError, FitError, SpecError: as :meth:`cache_bytes`.
        """
        caches = make_prompt_cache(self._model, spec)
        candidates = range(1, (self.context or MAX_TOKENS) + 1)
        return bisect.bisect_right(candidates, memory, key=lambda tokens: self._peak(caches, tokens, batch))

    def _resident(self, caches: Sequence[Any], calls: Sequence[int], batch: int) -> int:
        total, known = 0, dict[Any, int]()
        for index, (cache, own, given) in enumerate(zip(caches, self._own, self._given, strict=True)):
            alike = (_slug(cache), given) if given is not None else index  # layers are mostly alike, and counting takes time
            if alike not in known:
                try:
                    known[alike] = layer_bytes(cache if given is not None else own, given, calls, batch)
                except FootprintError as error:
                    raise FitError(f"layer {index} of {self._name} keeps a cache of its own, {error}") from None
            total += known[alike]
        return total

    def _peak(self, caches: Sequence[Any], tokens: int, batch: int) -> int:
        calls = prefill_calls(tokens)
        moments = range(max(1, len(calls) - 3), len(calls) + 1)  # the columns and the cache only grow
        return self.weight_bytes + max(
            self._resident(caches, calls[:count], batch) + self._working(caches, calls[count - 1], sum(calls[:count]), batch)
            for count in moments
        )

    def _working(self, caches: Sequence[Any], tokens: int, columns: int, batch: int) -> int:
        """Return what the layer that needs most works with, in a call of ``tokens`` that sees ``columns``."""
        attention = max(
            (self._attention(cache, given, tokens, columns) for cache, given in zip(caches, self._given, strict=True) if given),
            default=0,
        )
        return batch * self._itemsize * (attention + tokens * self._activations)

    def _attention(self, cache: Any, given: KeyValues, tokens: int, columns: int) -> int:
        """Return the numbers of scores and of a restored history."""
        if isinstance(cache, RotatingKVCache):
            columns = min(columns, cache.max_size + tokens)
        fused = self.device == "gpu" and given.key_dim in FUSED_HEAD_DIMS and not isinstance(cache, QuantizedKVCache)
        scores = 0 if fused else self._heads * tokens * columns
        restored = given.heads * columns * (given.key_dim + given.value_dim)
        return scores + (restored if isinstance(cache, KIVICache) and columns > tokens > 1 else 0)

    def _numbers_a_token(self, model: Module) -> int:
        """Return the numbers of the activations of the widest layer, a token."""
        dims = [module.weight.shape[-1] for module in _modules(model) if isinstance(module, Embedding)]
        queries = self._heads * max((given.key_dim for given in self._given if given), default=0)
        return max(map(self._projected, model.layers)) + HIDDEN_BUFFERS * max(dims, default=0) + QUERY_BUFFERS * queries

    def _projected(self, layer: Module) -> int:
        total = 0
        for module in _modules(layer):
            if isinstance(module, SwitchLinear):
                total += module.weight.shape[1] * self._number("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k")
            elif isinstance(module, Linear):
                total += module.weight.shape[0]
        return total

    def _number(self, *names: str) -> int:
        value = next((self._config[name] for name in names if isinstance(self._config.get(name), int)), None)
        if value is None:
            raise FitError(f"the config of {self._name} has no {names[0]}, which the peak of a prefill depends on")
        return int(value)


def read_bytes(text: str) -> int:
    """Read a size such as ``24GB``, ``16 GiB`` or ``17179869184``.

    Raises:
        FitError: it is none.
    """
    found = SIZE.fullmatch(text.strip())
    size = round(float(found[1]) * (1024 if found[3] else 1000) ** UNITS.index(found[2].upper())) if found else 0
    if not size:
        raise FitError(f"{text!r}: expected a size such as 24GB or 16GiB")
    return int(size)


def show_bytes(count: float) -> str:
    """Return a size in GB or MB of three digits or more."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _slug(cache: Any) -> tuple[Any, ...]:
    """Return what tells a cache apart from others that take in the same."""
    spec: CacheSpec | None = getattr(cache, "spec", None)
    return type(cache), spec and spec.slug, getattr(cache, "max_size", None)


def _modules(model: Module) -> list[Any]:
    return model.modules()  # type: ignore[no-untyped-call,no-any-return]
