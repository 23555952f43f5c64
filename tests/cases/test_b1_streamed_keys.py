"""B1: decode keys were never quantised (a flush of one token makes minimum and maximum equal) yet billed at 2 bits."""

from __future__ import annotations

import mlx.core as mx

from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.spec import CacheSpec

SPEC = CacheSpec(kind="kivi-roundtrip", key_bits=2, value_bits=2, group_size=32, residual_length=32, backend="mlx")


def test_streamed_keys_are_lossy_and_equal_one_shot():
    keys, values = mx.random.normal((2, 1, 2, 200, 64), key=mx.random.key(0))
    streamed, one_shot = RoundTripKIVICache(SPEC), RoundTripKIVICache(SPEC)
    streamed.update_and_fetch(keys[..., :32, :], values[..., :32, :])
    for token in range(32, 200):
        fetched = streamed.update_and_fetch(keys[..., token : token + 1, :], values[..., token : token + 1, :])
    expected = one_shot.update_and_fetch(keys, values)
    assert all(mx.array_equal(a, b).item() for a, b in zip(fetched, expected, strict=True))

    moved = mx.abs(fetched[0] - keys).max(axis=(0, 1, 3))
    assert mx.all(moved[:160] > 0).item(), "each quantised token has some key channel that was rounded"
    assert mx.all(moved[160:] == 0).item(), "the window is exact"
