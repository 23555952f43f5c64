"""B8: elsewhere padding rows share a key group with real tokens, so what a sequence stores depends on its neighbours."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.cache.batch import BatchKIVICache
from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

SPEC = CacheSpec(key_bits=2, value_bits=2, group_size=32, residual_length=0, backend="mlx")
CODES = ("key_words", "key_scale", "key_zero", "value_words", "value_scale", "value_zero")
PADDING, TOKENS = 7, 64


def prompt(pad_value):
    """Return keys or values of 64 tokens, and the same with 7 columns of padding of ``pad_value``."""
    real = mx.random.normal((1, 2, TOKENS, 64))
    return real, mx.full((1, 2, PADDING, 64), pad_value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_codes_of_real_tokens_do_not_depend_on_padding(side):
    mx.random.seed(0)
    (keys, key_padding), (values, value_padding) = prompt(50.0), prompt(50.0)
    longer_keys, longer_values = (mx.random.normal((1, 2, TOKENS + PADDING, 64)) for _ in range(2))
    if side == "left":
        batch = BatchKIVICache(SPEC, [PADDING, 0])
        padded = [mx.concatenate(pair, axis=-2) for pair in ((key_padding, keys), (value_padding, values))]
    else:
        batch = BatchKIVICache(SPEC, [0, 0])
        batch.prepare(lengths=[TOKENS, TOKENS + PADDING], right_padding=[PADDING, 0])
        padded = [mx.concatenate(pair, axis=-2) for pair in ((keys, key_padding), (values, value_padding))]
    batch.update_and_fetch(mx.concatenate([padded[0], longer_keys]), mx.concatenate([padded[1], longer_values]))
    batch.finalize()

    alone = KIVICache(SPEC)
    alone.update_and_fetch(keys, values)
    expected, row = alone.state, batch.extract(0).state
    assert row["offset"] == TOKENS
    for name in CODES:
        assert mx.array_equal(row[name], expected[name]), name
