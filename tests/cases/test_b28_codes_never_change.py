"""B28: history is quantised again at each flush and the error grows. Right: once written, a code never changes."""

from __future__ import annotations

import mlx.core as mx

from kivi.cache.single import KIVICache
from kivi.spec import CacheSpec

ALONG_TOKENS = {"key_words": -1, "key_scale": -1, "key_zero": -1, "value_words": -2, "value_scale": -2, "value_zero": -2}


def test_old_codes_are_the_same_bits_after_every_later_append():
    mx.random.seed(28)
    cache = KIVICache(CacheSpec(residual_length=32, sink_length=32, key_bits=4, value_bits=2, backend="mlx"))
    keys, values = mx.random.normal((2, 1, 2, 1024, 64))
    seen: dict[str, mx.array] = {}
    flushes, frontier = 0, 0
    for position in range(1024):
        cache.update_and_fetch(keys[..., position : position + 1, :], values[..., position : position + 1, :])
        if cache.frontier == frontier:
            continue
        flushes, frontier = flushes + 1, cache.frontier
        state = cache.state
        for name, axis in ALONG_TOKENS.items():
            if state[name] is None:
                continue
            if name in seen:
                old = mx.split(state[name], [seen[name].shape[axis]], axis=axis)[0]
                assert mx.array_equal(old, seen[name]).item(), (position, name)
            seen[name] = mx.array(state[name])
    assert flushes >= 30 and cache.frontier == 992
