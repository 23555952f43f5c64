"""B5: trim leaves the frontier ahead of the offset and regrowth reads stale rows.

Right: as a cache that was given the kept 58 tokens as its history, within the documented bound: what had been rounded stays
as it was rounded, and a key that is rounded again, with its new group, moves by at most half that group's scale.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.cache.single import KIVICache
from kivi.quantize import group_roundtrip
from kivi.spec import CacheSpec

SPEC = CacheSpec(residual_length=32, param_dtype="float32", backend="mlx")


def tokens(count: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((1, 2, count, 64)), mx.random.normal((1, 2, count, 64))


@pytest.mark.parametrize("calls", [[70], [1] * 70])
def test_128_tokens_trim_70_append_70(calls):
    mx.random.seed(5)
    first, second = tokens(128), tokens(70)
    cache = KIVICache(SPEC)
    cache.update_and_fetch(*first)
    rounded = [x[..., :58, :] for x in cache.dequantized()]
    assert cache.trim(70) == 70 and cache.offset == 58

    start = 0
    for count in calls:
        cache.update_and_fetch(*(x[..., start : start + count, :] for x in second))
        start += count
    regrown = cache.dequantized()
    assert cache.offset == 128 and cache.frontier == 96

    # A cache whose history is the kept tokens as they were seen, given the new ones, is exactly this cache.
    direct = KIVICache(SPEC)
    direct.update_and_fetch(*rounded)
    direct.update_and_fetch(*second)
    expected = direct.dequantized()
    for ours, theirs in zip(regrown, expected, strict=True):
        assert mx.array_equal(ours[..., 32:, :], theirs[..., 32:, :]).item()
    # The first group was kept as it was; rounding it again would be the identity up to float32's rounding.
    for ours, theirs, kept in zip(regrown, expected, rounded, strict=True):
        assert mx.array_equal(ours[..., :32, :], kept[..., :32, :]).item()
        assert mx.allclose(ours[..., :32, :], theirs[..., :32, :], atol=1e-5).item()

    # Against the exact tokens: the error of one rounding, and for the 26 cut tokens half a scale of the new group more.
    exact = [mx.concatenate([a[..., :58, :], b], axis=-2) for a, b in zip(first, second, strict=True)]
    once = mx.abs(rounded[0] - first[0][..., :58, :])
    joined = mx.concatenate([rounded[0], second[0]], axis=-2)[..., 32:64, :]
    half_scale = (mx.max(joined, axis=-2) - mx.min(joined, axis=-2)) / (3 * 2)
    twice = mx.abs(regrown[0] - exact[0])[..., 32:58, :]
    assert mx.all(twice <= once[..., 32:, :] + half_scale[..., None, :] + 1e-5).item()
    value_error = mx.abs(regrown[1] - group_roundtrip(exact[1], bits=2, group_size=32, axis=-1, param_dtype=mx.float32))
    assert mx.max(value_error[..., :58, :]).item() < 1e-5  # values are, in effect, rounded once
    assert mx.array_equal(regrown[0][..., 96:, :], exact[0][..., 96:, :]).item()


def test_a_trim_to_nothing_and_regrowth_is_a_new_cache():
    first, second = tokens(200), tokens(150)
    cache, fresh = KIVICache(SPEC), KIVICache(SPEC)
    cache.update_and_fetch(*first)
    assert cache.trim(1000) == 200 and cache.empty() and cache.frontier == 0
    cache.update_and_fetch(*second)
    fresh.update_and_fetch(*second)
    assert all(mx.array_equal(a, b).item() for a, b in zip(cache.dequantized(), fresh.dequantized(), strict=True))
    assert cache.bytes() == fresh.bytes()
