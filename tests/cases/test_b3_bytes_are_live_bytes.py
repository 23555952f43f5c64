"""B3: reported bytes are not the live bytes. Right: resident = accounted + stated spare, and MLX's meter agrees."""

from __future__ import annotations

import gc

import mlx.core as mx

from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec


def active_memory() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def test_200_tokens_weigh_what_the_cache_says():
    before = active_memory()
    cache = KIVICache(CacheSpec(residual_length=32, backend="mlx"))
    cache.update_and_fetch(mx.random.normal((1, 8, 200, 64)), mx.random.normal((1, 8, 200, 64)))
    weight = cache.bytes()
    grown = active_memory() - before
    assert weight.resident == weight.accounted + weight.spare
    # 160 tokens quantised, 40 in the window; 8 heads, 64 channels, 2 bits, groups of 32, scale and zero in float16
    assert weight.key_codes == weight.value_codes == 160 * 8 * 64 * 2 // 8
    assert weight.key_params == weight.value_params == 160 * 8 * 64 // 32 * 4
    assert weight.residual == 2 * 40 * 8 * 64 * 4
    assert weight.full_precision == 2 * 200 * 8 * 64 * 4
    assert abs(grown - weight.resident) <= 8 * 16384  # eight arrays, each rounded up to a page at most
