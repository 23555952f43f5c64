"""B17: grouped-query masks broadcast wrongly. Right: every mask gives what standard attention does."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask

from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec


def agrees(mask: mx.array | str | None, length: int, total: int, *, sinks: int = 0, residual: int = 32) -> bool:
    """Attend with 8 query heads on 2 KV heads, 2 sequences; compare with fused attention on the dequantised history."""
    mx.random.seed(total)
    cache = KIVICache(CacheSpec(residual_length=residual, sink_length=sinks, backend="mlx"))
    cache.update_and_fetch(*mx.random.normal((2, 2, 2, total - length, 32)))
    cache.update_and_fetch(*mx.random.normal((2, 2, 2, length, 32)))
    assert cache.frontier > sinks
    queries = mx.random.normal((2, 8, length, 32))
    out = cache.attend(queries, scale=0.2, mask=mask)
    expected = mx.fast.scaled_dot_product_attention(queries, *cache.keys_and_values(), scale=0.2, mask=mask)
    return mx.allclose(out, expected, atol=1e-5).item()


def test_a_boolean_mask_of_one_query_for_each_sequence():
    mask = mx.arange(66)[None, None, None] >= mx.array([0, 9])[:, None, None, None]
    assert mask.shape == (2, 1, 1, 66)
    assert agrees(mask, 1, 66, residual=0)


def test_an_additive_mask_for_each_query_head():
    assert agrees(mx.random.normal((2, 8, 4, 70)), 4, 70, residual=0)


@pytest.mark.parametrize("sinks", [0, 32])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_the_masks_that_mlx_lm_makes(length, sinks):
    before = 150 - length
    assert agrees("causal", length, 150, sinks=sinks)
    assert agrees(None, length, 150, sinks=sinks)
    assert agrees(create_causal_mask(length, before), length, 150, sinks=sinks)  # [L, N]
    assert agrees(create_causal_mask(length, before, window_size=40), length, 150, sinks=sinks)  # hides sinks and codes
    assert agrees(create_causal_mask(length, before, left_padding=mx.array([0, 70])), length, 150, sinks=sinks)  # [2, 1, L, N]
    additive = mx.where(create_causal_mask(length, before), 0.0, -1e9)
    assert agrees(additive, length, 150, sinks=sinks)
    assert agrees(mx.zeros((1, 1, 1, 1)), length, 150, sinks=sinks)


def test_a_row_that_is_masked_throughout_gives_no_nan():
    mask = mx.zeros((1, 1, 1, 150), mx.bool_)
    assert agrees(mask, 1, 150)
