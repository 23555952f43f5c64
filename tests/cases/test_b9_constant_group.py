"""B9: a constant group divided zero by zero."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.quantize import group_roundtrip


@pytest.mark.parametrize("param_dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_constant_key_channel_comes_back_exactly(bits, param_dtype):
    keys = mx.random.normal((1, 1, 32, 64), key=mx.random.key(0))
    keys[..., 3] = 3.5
    restored = group_roundtrip(keys, bits=bits, group_size=32, axis=-2, param_dtype=param_dtype)
    assert mx.all(mx.isfinite(restored)).item()
    assert mx.all(restored[..., 3] == 3.5).item()
