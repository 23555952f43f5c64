"""Bytes of a cache before there is one are those of the arrays that it then holds, however the tokens came."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from kivi import CacheSpec, KIVICache, RoundTripKIVICache
from kivi.footprint import FootprintError, KeyValues, layer_bytes
from kivi.measure.memory import held_bytes

SPECS = [
    CacheSpec.parse(f"{text},backend=mlx")
    for text in (
        "kivi:bits=2",
        "kivi:bits=8,residual=0,params=float32",
        "kivi:key_bits=4,value_bits=3,group=64,sinks=64,residual=40",
        "kivi:bits=3,group=128,residual=0,sinks=256",
    )
]
CALLS = st.lists(st.integers(1, 700) | st.just(1), min_size=1, max_size=12)
GIVEN = KeyValues(heads=2, key_dim=32, value_dim=64, key_dtype=mx.float32, value_dtype=mx.float16)


def feed(cache: Any, calls: list[int], batch: int = 2) -> Any:
    for tokens in calls:
        shape = (batch, GIVEN.heads, tokens)
        keys, values = mx.ones((*shape, GIVEN.key_dim)), mx.ones((*shape, GIVEN.value_dim), mx.float16)
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)
    return cache


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.slug)
@given(calls=CALLS)
@example(calls=[8192, 1, 1])  # codes that grow by a 32nd of what is there
@example(calls=[8192 + 128 + 31, 1, 1])
@example(calls=[8192 + 64 + 40 + 63, 1, 1])
@example(calls=[8192 + 256, *[1] * 130])
@example(calls=[8479, 600])  # full, then grown twice in a call
@settings(max_examples=25)
def test_packed_caches(spec: CacheSpec, calls: list[int]) -> None:
    cache = feed(KIVICache(spec), calls)
    assert layer_bytes(KIVICache(spec), GIVEN, calls, batch=2) == held_bytes(cache) == cache.nbytes
    assert KeyValues.held(cache) == GIVEN


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        lambda: QuantizedKVCache(group_size=32, bits=4),
        lambda: RotatingKVCache(max_size=300, keep=4),
        lambda: RotatingKVCache(max_size=1000),
        lambda: RoundTripKIVICache(CacheSpec(kind="kivi-roundtrip", backend="mlx")),
    ],
)
@given(calls=CALLS)
@example(calls=[256, 100, 1])
@example(calls=[300, 1, 1, 299, 2, 1])
@example(calls=[299, 2])
@settings(max_examples=25)
def test_mlx_lms_caches(make: Any, calls: list[int]) -> None:
    cache = feed(make(), calls)
    assert layer_bytes(make(), GIVEN, calls, batch=2) == held_bytes(cache)


def test_a_cache_that_is_not_known_is_refused() -> None:
    with pytest.raises(FootprintError, match="ChunkedKVCache"):
        layer_bytes(ChunkedKVCache(8), GIVEN, [4], batch=1)
