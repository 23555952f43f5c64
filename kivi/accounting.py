"""What a cache weighs: the bytes it holds, the bytes it should hold, the bytes it replaces."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, Field, computed_field


class CacheBytes(BaseModel):
    """The bytes of one cache, or of the sum of several.

    ``resident`` is measured from the live arrays; every other figure is computed from token counts, shapes and item sizes.
    An honest cache has ``resident == accounted + spare``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    resident: int = Field(description="bytes of the arrays that the cache keeps alive")
    full_precision: int = Field(description="bytes of the same tokens, keys and values, unquantised in the dtype that was run")
    key_codes: int = Field(0, description="bytes of packed key codes")
    key_params: int = Field(0, description="bytes of the scales and zeros of keys")
    value_codes: int = Field(0, description="bytes of packed value codes")
    value_params: int = Field(0, description="bytes of the scales and zeros of values")
    residual: int = Field(0, description="bytes of tokens in full precision: sinks and residual window")
    spare: int = Field(0, description="bytes of capacity that is allocated and holds no token")

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
