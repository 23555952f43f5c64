"""B15: attention sinks with a quantised cache raise. Right: folded into the softmax, equal to standard attention."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("length", [1, 4, 20])
def test_sinks_are_folded_into_the_softmax(length, dtype):
    mx.random.seed(length)
    cache = KIVICache(CacheSpec(residual_length=32, backend="mlx"))
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 160, 64)).astype(dtype))
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, length, 64)).astype(dtype))
    queries = mx.random.normal((1, 8, length, 64)).astype(dtype)
    sinks = mx.array([-3.0, 0.0, 1.0, 2.0, 5.0, -1.0, 9.0, 0.5]).astype(dtype)
    out = cache.attend(queries, scale=0.125, mask="causal", sinks=sinks)
    keys, values = cache.keys_and_values()
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125, mask="causal", sinks=sinks)
    bound = 1e-5 if dtype == mx.float32 else 1e-2  # the backend's, relative to the largest output
    assert mx.max(mx.abs(out - expected)).item() < bound * mx.max(mx.abs(expected)).item()
    without = cache.attend(queries, scale=0.125, mask="causal")
    assert mx.max(mx.abs(without - out)).item() > 0.01
