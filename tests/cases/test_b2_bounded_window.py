"""B2: the full-precision tail grew for ever when the residual was shorter than a group."""

from __future__ import annotations

import mlx.core as mx

from kivi.cache.roundtrip import RoundTripKIVICache
from kivi.spec import CacheSpec


def test_the_tail_holds_at_most_a_residual_and_a_started_group():
    spec = CacheSpec(kind="kivi-roundtrip", residual_length=4, group_size=32, backend="mlx")
    cache = RoundTripKIVICache(spec)
    cache.update_and_fetch(*mx.random.normal((2, 1, 1, 10, 32), key=mx.random.key(0)))
    for step in range(100):
        cache.update_and_fetch(*mx.random.normal((2, 1, 1, 1, 32), key=mx.random.key(step)))
        tail = cache.offset - cache.frontier
        assert tail <= spec.residual_length + spec.group_size - 1
    assert cache.frontier == 96
