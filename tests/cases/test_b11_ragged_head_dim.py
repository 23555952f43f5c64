"""B11: head_dim 72, 80, 96. Right: it works; a ragged last group of values is padded in storage and billed as stored."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.cache.single import DequantizedKIVICache, KIVICache
from kivi.quantize import group_roundtrip, padded_length
from kivi.spec import CacheSpec


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("dim", [72, 80, 96])
def test_head_dims_that_are_no_whole_number_of_groups(dim, group_size):
    mx.random.seed(dim)
    spec = CacheSpec(group_size=group_size, residual_length=0, backend="mlx")
    keys, values = mx.random.normal((2, 1, 2, 128, dim))
    token, query = mx.random.normal((1, 2, 1, dim)), mx.random.normal((1, 2, 1, dim))
    cache, control = KIVICache(spec), DequantizedKIVICache(spec)
    outs = []
    for each in (cache, control):
        each.update_and_fetch(keys, values)
        weight = each.bytes()
        each.update_and_fetch(token, token)
        outs.append(each.attend(query, scale=0.1))
        assert weight.is_honest
        assert weight.key_codes == 128 * 2 * dim * 2 // 8
        assert weight.value_codes == 128 * 2 * padded_length(dim, group_size) * 2 // 8
        assert weight.value_params == 128 * 2 * padded_length(dim, group_size) // group_size * 4
    assert outs[0].shape == (1, 2, 1, dim)
    assert mx.allclose(*outs, atol=1e-5).item()
    expected = group_roundtrip(values, bits=2, group_size=group_size, axis=-1)
    assert mx.array_equal(cache.dequantized()[1][..., :128, :], expected).item()
