"""Sensitivity: what the codes of one layer's keys, or of its values, do to the model's output, all else exact.

A measurement reads the whole text in one call. The layer's cache gives every query what it would see if tokens came one at a
time, codes up to its own frontier and exact tokens after it, so the result is that of decoding. Layers before the measured one
do what they did in the exact pass, and give that again.

Measuring layers apart to give each its own bits is KVTuner's way (arXiv:2502.04420, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from kivi.attention import attention_installed
from kivi.build import make_prompt_cache
from kivi.codec import Codec
from kivi.measure import MeasureError
from kivi.measure.arms import FULL, batch
from kivi.measure.quality import divergence
from kivi.measure.records import Count, Divergence, Record
from kivi.measure.schedule import first_visible
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

Side = Literal["keys", "values"]
SIDES: tuple[Side, Side] = ("keys", "values")
ALIKE = 1e-6  # nats: more is no noise of floats


class Sensitivity(Record):
    """What one side of one layer does to the output, as codes of so many bits."""

    cell_key: str
    layer: Count
    side: Side
    bits: Count
    rotated: bool
    kl_mean: Divergence
    positions: Count


class SensitivityProbe:
    """One model and one text, read once with full caches, then again for each measurement.

    Args:
        model: The model.
        tokens: The text.
        base: Groups, sinks and window; bits and rotation are each measurement's own.
        stride: Every how many positions outputs are compared, from the first that sees a code on.

    Raises:
        MeasureError: no position of the text sees a code, or the logits are not finite.
    """

    def __init__(self, model: LoadedModel, tokens: Sequence[int], base: CacheSpec, *, stride: int = 1) -> None:
        first = first_visible([base])
        if len(tokens) <= first:
            raise MeasureError(f"{len(tokens)} tokens: {base.slug} has its first codes at position {first}: give more text")
        self._model, self._base = model.model, base
        self._tokens = batch([tokens])
        self._positions = mx.arange(first, len(tokens), stride)
        self._outputs: list[Any] = []
        self._exact = self._read(make_prompt_cache(self._model, FULL))
        if not mx.all(mx.isfinite(self._exact)):
            raise MeasureError(f"{model.name}: NaN or infinity in the logits of the full cache; look at weights and dtype")
        self._replays = self._can_replay()

    @property
    def positions(self) -> int:
        """How many positions are compared."""
        return int(self._positions.size)

    def measure(self, layer: int, side: Side, bits: int, rotated: bool) -> float:
        """Return the mean KL from the exact output, in nats, with one side of one layer as codes of ``bits`` bits.

        Raises:
            MeasureError: the logits are not finite.
        """
        spec = self._base.model_copy(update={f"{side[:-1]}_bits": bits, "rotate": side if rotated else "none"})
        caches = make_prompt_cache(self._model, FULL)
        caches[layer] = _OneSide(spec, side)
        kl = float(mx.mean(divergence(self._exact, self._read(caches, start=layer if self._replays else 0))))
        if not kl < float("inf"):
            raise MeasureError(
                f"layer {layer}, {side} in {bits} bits: NaN or infinity in the logits; look at weights and dtype"
            )
        return kl

    def _read(self, caches: list[Any], start: int = 0) -> mx.array:
        """Return the logits of the compared positions; layers before ``start`` give what they gave in the first pass."""
        with attention_installed(self._model), self._watched(start):
            logits: mx.array = self._model(self._tokens, cache=caches)[0, self._positions].astype(mx.float32)
            mx.eval(logits)
        return logits

    @contextmanager
    def _watched(self, start: int) -> Iterator[None]:
        """Note what layers return in the first pass, and have those before ``start`` return it again in later ones."""
        layers = self._model.layers
        own = list(layers)
        if not self._outputs:
            noted = [_Noted(layer) for layer in own]
            layers[:] = noted
        else:
            layers[:start] = [_Replayed(layer, output) for layer, output in zip(own[:start], self._outputs, strict=False)]
        try:
            yield
            if not self._outputs:
                self._outputs = [layer.output for layer in noted]
                mx.eval([output for output in self._outputs if output is not None])
        finally:
            layers[:] = own

    def _can_replay(self) -> bool:
        """Whether the model asks its layers in order, and nothing else of what they compute: tried out with the last one."""
        if any(not isinstance(output, mx.array) for output in self._outputs):
            return False
        again = self._read(make_prompt_cache(self._model, FULL), start=len(self._outputs) - 1)
        return float(mx.mean(divergence(self._exact, again))) < ALIKE


class _Noted:
    """A layer that keeps what it returned."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._layer(*args, **kwargs)
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Replayed(_Noted):
    """A layer that returns what it is told."""

    def __init__(self, layer: Any, output: Any) -> None:
        super().__init__(layer)
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002  what a layer is given
        return self.output


class _OneSide(KVCache):  # type: ignore[misc]  # mlx_lm is untyped
    """A layer's cache for one call, which attends to keys or values as codes where the query would see codes.

    Args:
        spec: Codecs, sinks and window.
        side: What is quantised.
    """

    def __init__(self, spec: CacheSpec, side: Side) -> None:
        super().__init__()
        self._spec, self._side = spec, side

    def attend(
        self, queries: mx.array, *, scale: float, mask: mx.array | str | None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend as :func:`kivi.attention.scaled_dot_product_attention` says, ``[1, H_q, L, D_k]`` to ``[1, H_q, L, D_v]``."""
        keys, values = (array.astype(mx.float32) for array in self.keys_and_values())
        length, heads = queries.shape[2], keys.shape[1]
        grouped = queries.astype(mx.float32).reshape(1, heads, -1, length, queries.shape[-1]) * scale
        seen = self._seen_as_codes(length)
        scores = grouped @ keys[:, :, None].swapaxes(-1, -2)
        if self._side == "keys":
            scores = mx.where(seen, grouped @ self._rounded(keys)[:, :, None].swapaxes(-1, -2), scores)
        weights = _softmax(scores, mask, sinks)
        if self._side == "keys":
            attended = weights @ values[:, :, None]
        else:
            on_codes = mx.where(seen, weights, 0.0)
            attended = on_codes @ self._rounded(values)[:, :, None] + (weights - on_codes) @ values[:, :, None]
        output: mx.array = attended.reshape(1, -1, length, values.shape[-1]).astype(queries.dtype)
        return output

    def _seen_as_codes(self, length: int) -> mx.array:
        """Return ``[L, L]``: whether a query sees a token as codes."""
        frontiers = [self._spec.sink_length + self._spec.quantized_tokens(position + 1) for position in range(length)]
        tokens = mx.arange(length)
        return (tokens >= self._spec.sink_length) & (tokens < mx.array(frontiers)[:, None])

    def _rounded(self, tokens: mx.array) -> mx.array:
        """Return ``[1, H, S, D]`` with every token rounded that some query sees as codes."""
        codec: Codec = getattr(self._spec.codecs, self._side)
        start = self._spec.sink_length
        stop = start + self._spec.quantized_tokens(tokens.shape[2])
        part = codec.rotate_back(codec.roundtrip(codec.rotate(tokens[..., start:stop, :])))
        return mx.concatenate([tokens[..., :start, :], part, tokens[..., stop:, :]], axis=2)


def _softmax(scores: mx.array, mask: mx.array | str | None, sinks: mx.array | None) -> mx.array:
    """Return the weights of masked scores ``[1, H, n, L, S]``; ``sinks`` are logits that take weight and give nothing."""
    length, tokens = scores.shape[-2:]
    if isinstance(mask, str):
        mask = mx.arange(tokens) <= mx.arange(length)[:, None]
    if mask is not None:
        if mask.ndim == 4:
            mask = mask[:, :, None]
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is None:
        return mx.softmax(scores, axis=-1)
    extra = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, *scores.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
