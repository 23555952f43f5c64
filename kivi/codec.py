"""Codec: how numbers become codes. Specs, caches, backends and accounting ask it; :mod:`kivi.quantize` is the definition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Self

import mlx.core as mx

from kivi.quantize import (
    WORD_BITS,
    QuantizedGroups,
    group_dequantize,
    group_quantize,
    group_roundtrip,
    pack,
    padded_length,
    smallest_scale,
)
from kivi.rotation import require_order, rotate, rotate_back

Rotate = Literal["none", "keys", "values", "both"]


class Packed(NamedTuple):
    """Packed codes with the scale and zero of their groups: the triple that ``mx.quantized_matmul`` takes.

    Keys (groups along tokens): words ``[B, H, D, S * bits / 32]``, scale and zero ``[B, H, D, S / G]``.
    Values (groups along channels): words ``[B, H, S, D' * bits / 32]``, scale and zero ``[B, H, S, D' / G]``, where ``D'``
    is ``D`` padded to whole groups. Words are uint32, codes low bits first; scale and zero are in ``param_dtype``.
    """

    words: mx.array
    scale: mx.array
    zero: mx.array


@dataclass(frozen=True)
class Codec:
    """How keys or values become codes.

    Attributes:
        bits: Bits a code.
        group_size: Numbers that share a scale and a zero.
        axis: -2: groups of tokens, one a channel (keys). -1: groups of channels, one a token (values).
        param_dtype: dtype of scales and zeros.
        rotated: Whether codes are of rotated numbers (:mod:`kivi.rotation`).
    """

    bits: int
    group_size: int
    axis: int
    param_dtype: mx.Dtype
    rotated: bool = False

    def __hash__(self) -> int:
        return hash((self.bits, self.axis))  # quick: codecs are part of what prepared launches are found by

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # frozen; an mx.Dtype cannot be copied

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def smallest_scale(self) -> float:
        """The floor of a scale."""
        return smallest_scale(self.param_dtype)

    @property
    def codes_per_word(self) -> int:
        """Whole codes in a word of 32 bits."""
        return WORD_BITS // self.bits

    @property
    def growing_axis(self) -> int:
        """The axis of packed arrays along which tokens lie: keys are stored transposed."""
        return -1 if self.axis == -2 else -2

    def words(self, numbers: int) -> int:
        """Return the words that hold ``numbers``, whole groups."""
        return numbers * self.bits // WORD_BITS

    def groups(self, numbers: int) -> int:
        """Return how many groups ``numbers``, whole groups, are."""
        return numbers // self.group_size

    def padded(self, numbers: int) -> int:
        """Return ``numbers`` along the grouped axis, rounded up to whole groups."""
        return padded_length(numbers, self.group_size)

    def stored_channels(self, channels: int) -> int:
        """Return how many channels are stored for ``channels``: values are padded to whole groups."""
        return channels if self.axis == -2 else self.padded(channels)

    def lengths(self, tokens: int) -> tuple[int, int, int]:
        """Return what ``tokens`` take along the growing axis of words, scales and zeros."""
        if self.axis == -2:
            return self.words(tokens), self.groups(tokens), self.groups(tokens)
        return tokens, tokens, tokens

    def shapes(self, tokens: int, channels: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the last two axes of the words, and of scales and zeros, of ``tokens`` with ``channels`` each."""
        if self.axis == -2:
            return (channels, self.words(tokens)), (channels, self.groups(tokens))
        padded = self.padded(channels)
        return (tokens, self.words(padded)), (tokens, self.groups(padded))

    def code_bytes(self, tokens: int, channels: int) -> int:
        """Return the bytes of the codes of ``tokens``, whole groups of them for keys, with ``channels`` each."""
        return tokens * self.stored_channels(channels) * self.bits // 8

    def param_bytes(self, tokens: int, channels: int) -> int:
        """Return the bytes of the scales and zeros of ``tokens``, whole groups of them for keys, with ``channels`` each."""
        return self.groups(tokens * self.stored_channels(channels)) * 2 * self.param_dtype.size

    def require_channels(self, channels: int) -> None:
        """Refuse what :meth:`rotate` would refuse.

        Raises:
            RotationError: this many channels cannot be rotated, and are to be.
        """
        if self.rotated:
            require_order(channels)

    def rotate(self, x: mx.array) -> mx.array:
        """Return ``x``, ``[..., D]``, in the basis that is quantised; see :func:`kivi.rotation.rotate`."""
        return rotate(x) if self.rotated else x

    def rotate_back(self, x: mx.array) -> mx.array:
        """Return what :meth:`rotate` made ``x`` of; see :func:`kivi.rotation.rotate_back`."""
        return rotate_back(x) if self.rotated else x

    def quantize(self, x: mx.array) -> QuantizedGroups:
        """Return what :func:`kivi.quantize.group_quantize` makes of ``x``, ``[..., S, D]``, rotated or not."""
        return group_quantize(x, bits=self.bits, group_size=self.group_size, axis=self.axis, param_dtype=self.param_dtype)

    def dequantize(self, quantized: QuantizedGroups, dtype: mx.Dtype, length: int | None = None) -> mx.array:
        """Return what :func:`kivi.quantize.group_dequantize` makes of what :meth:`quantize` returned."""
        return group_dequantize(quantized, group_size=self.group_size, axis=self.axis, dtype=dtype, length=length)

    def roundtrip(self, x: mx.array) -> mx.array:
        """Return what :func:`kivi.quantize.group_roundtrip` makes of ``x``, ``[..., S, D]``, rotated or not."""
        return group_roundtrip(x, bits=self.bits, group_size=self.group_size, axis=self.axis, param_dtype=self.param_dtype)

    def pack(self, quantized: QuantizedGroups) -> Packed:
        """Return what :meth:`quantize` returned, of whole groups, as it is stored."""
        codes, scale, zero = (part.swapaxes(-1, -2) if self.axis == -2 else part for part in quantized)
        return Packed(pack(codes, self.bits), scale, zero)


class Codecs(NamedTuple):
    """The codecs of a cache; both have the same groups and parameters."""

    keys: Codec
    values: Codec

    @classmethod
    @lru_cache
    def of(cls, *, key_bits: int, value_bits: int, group_size: int, param_dtype: mx.Dtype, rotate: Rotate = "none") -> Self:
        """Return the codecs of keys per channel and values per token, the same object for the same arguments."""
        return cls(
            Codec(key_bits, group_size, -2, param_dtype, rotated=rotate in {"keys", "both"}),
            Codec(value_bits, group_size, -1, param_dtype, rotated=rotate in {"values", "both"}),
        )

    @property
    def rotated(self) -> bool:
        """Whether keys or values are rotated."""
        return self.keys.rotated or self.values.rotated

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a zero; codes are stored in as many tokens at a time."""
        return self.keys.group_size

    @property
    def growing_axes(self) -> tuple[int, ...]:
        """Along which words, scales and zeros of keys grow, then those of values."""
        return tuple(codec.growing_axis for codec in self for _ in range(3))

    def lengths(self, tokens: int) -> tuple[int, ...]:
        """Return what ``tokens`` take along :attr:`growing_axes`."""
        return (*self.keys.lengths(tokens), *self.values.lengths(tokens))
