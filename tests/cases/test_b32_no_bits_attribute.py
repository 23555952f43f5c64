"""B32: elsewhere an attribute ``bits`` makes mlx-lm take a cache for its own quantised one and read tuples."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from kivi import BatchKIVICache, CacheSpec, KIVICache, RoundTripKIVICache

CACHES = {
    "KIVICache": lambda: KIVICache(CacheSpec(backend="mlx")),
    "BatchKIVICache": lambda: BatchKIVICache(CacheSpec(backend="mlx"), [0]),
    "RoundTripKIVICache": lambda: RoundTripKIVICache(CacheSpec(kind="kivi-roundtrip", backend="mlx")),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_no_cache_has_bits_and_mlx_lms_attention_takes_what_it_returns_for_arrays(make):
    cache = make()
    keys = mx.random.normal((1, 2, 200, 64))
    fetched = cache.update_and_fetch(keys, keys)
    assert not hasattr(cache, "bits")
    assert all(isinstance(part, mx.array) for part in fetched)
    out = scaled_dot_product_attention(keys[..., -1:, :], *fetched, cache=cache, scale=0.125, mask=None)
    assert out.shape == (1, 2, 1, 64)
