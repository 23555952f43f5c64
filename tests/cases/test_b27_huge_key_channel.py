"""B27: one huge key channel ruins keys that are quantised per token. Right: per channel, attention keeps its distance small."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.cache.single import KIVICache
from kivi.quantize import group_roundtrip
from kivi.spec import CacheSpec


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_channel_5_at_300(dtype):
    mx.random.seed(27)
    keys, values = mx.random.normal((2, 1, 2, 256, 64))
    keys[..., 5] += 300
    keys, values = keys.astype(dtype), values.astype(dtype)
    token = mx.random.normal((1, 2, 1, 64)).astype(dtype)
    query = mx.random.normal((1, 2, 1, 64))
    query[..., 5] *= 0.01  # as RoPE'd models do, lest that channel alone decide
    query = query.astype(dtype)
    cache = KIVICache(CacheSpec(key_bits=4, value_bits=8, residual_length=0, backend="mlx"))
    cache.update_and_fetch(keys, values)
    cache.update_and_fetch(token, token)

    def attend(history: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            query.astype(mx.float32),
            mx.concatenate([history, token], axis=-2).astype(mx.float32),
            mx.concatenate([values, token], axis=-2).astype(mx.float32),
            scale=0.125,
        )

    exact = attend(keys)
    per_token = attend(group_roundtrip(keys, bits=4, group_size=32, axis=-1))
    ours = cache.attend(query, scale=0.125).astype(mx.float32)
    distance = mx.max(mx.abs(ours - exact)).item()
    assert distance < 0.2 * mx.max(mx.abs(per_token - exact)).item()
