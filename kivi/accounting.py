"""What a cache weighs: the bytes it holds, the bytes it should hold, the bytes it replaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, computed_field, model_validator

from kivi.codec import Codecs


class CacheBytes(BaseModel):
    """The bytes of one cache, or of the sum of several.

    ``resident`` is measured from the live arrays; every other figure is computed from token counts, shapes and item sizes.
    An honest cache has ``resident == accounted + spare``; ``spare`` is below 0 where a cache holds less than it accounts for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    resident: NonNegativeInt = Field(description="bytes of the arrays that the cache keeps alive")
    full_precision: NonNegativeInt = Field(
        description="bytes of the same tokens, keys and values, unquantised in the dtype that was run"
    )
    key_codes: NonNegativeInt = Field(0, description="bytes of packed key codes")
    key_params: NonNegativeInt = Field(0, description="bytes of the scales and zeros of keys")
    value_codes: NonNegativeInt = Field(0, description="bytes of packed value codes")
    value_params: NonNegativeInt = Field(0, description="bytes of the scales and zeros of values")
    residual: NonNegativeInt = Field(0, description="bytes of tokens in full precision: sinks and residual window")
    spare: int = Field(0, description="bytes of capacity that is allocated and holds no token")

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, fields: Any) -> Any:
        """Let what was written be read: the record on disk also holds ``accounted``, which is computed."""
        return {name: value for name, value in fields.items() if name != "accounted"} if isinstance(fields, dict) else fields

    @computed_field(description="bytes that the tokens need: codes, scales and zeros, and residual")  # type: ignore[prop-decorator]
    @property
    def accounted(self) -> int:
        return self.key_codes + self.key_params + self.value_codes + self.value_params + self.residual

    @property
    def is_honest(self) -> bool:
        """Whether the live arrays weigh what the counts say."""
        return self.resident == self.accounted + self.spare

    def __add__(self, other: CacheBytes) -> CacheBytes:
        fields = type(self).model_fields
        return CacheBytes(**{name: getattr(self, name) + getattr(other, name) for name in fields})


def sum_bytes(parts: Iterable[CacheBytes]) -> CacheBytes:
    """Return the sum over layers."""
    total = CacheBytes(resident=0, full_precision=0)
    for part in parts:
        total = total + part
    return total


def resident_bytes(arrays: Iterable[mx.array | None]) -> int:
    """Return the bytes of ``arrays``, each object counted once.

    The caller guarantees that each array owns its buffer: ``nbytes`` of a view is smaller than what it keeps alive.
    """
    distinct = {id(array): array for array in arrays if array is not None}
    return sum(array.nbytes for array in distinct.values())


class Token(NamedTuple):
    """What a token of one KV head is in full precision: channels of key and value, and bytes of one of their numbers.

    Keys and values differ in dtype where a 16-bit model norms its keys in float32.
    """

    key_dim: int
    value_dim: int
    key_itemsize: int
    value_itemsize: int

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> Token:
        """Return that of arrays ``[..., D]``."""
        return cls(keys.shape[-1], values.shape[-1], keys.itemsize, values.itemsize)

    @property
    def size(self) -> int:
        """Bytes of key and value."""
        return self.key_dim * self.key_itemsize + self.value_dim * self.value_itemsize


def packed_bytes(
    codecs: Codecs,
    token: Token,
    *,
    rows: int,
    quantized: int,
    exact: int,
    resident: int,
    spare: int = 0,
) -> CacheBytes:
    """Bill a packed cache from its counts (layout: docs/cache.md).

    Args:
        codecs: What a quantised token costs.
        token: A token in full precision.
        rows: Batch rows times KV heads.
        quantized: Tokens a row that are stored as codes, a whole number of groups.
        exact: Tokens a row in full precision.
        resident: Bytes of the live arrays, measured by the caller.
        spare: Bytes of capacity that holds no token.
    """
    return CacheBytes(
        resident=resident,
        full_precision=rows * (quantized + exact) * token.size,
        key_codes=rows * codecs.keys.code_bytes(quantized, token.key_dim),
        key_params=rows * codecs.keys.param_bytes(quantized, token.key_dim),
        value_codes=rows * codecs.values.code_bytes(quantized, token.value_dim),
        value_params=rows * codecs.values.param_bytes(quantized, token.value_dim),
        residual=rows * exact * token.size,
        spare=spare,
    )
