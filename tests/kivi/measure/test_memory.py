"""Bytes that are counted for a length nobody ran are those of the arrays that are live at that length."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from kivi.cache.single import KIVICache
from kivi.footprint import prefill_calls
from kivi.measure.arms import Arm
from kivi.measure.memory import cache_bytes, counted_bytes_per_token
from kivi.models import LoadedModel
from kivi.spec import CacheSpec

SPECS = [
    "full",
    "kivi:bits=2,backend=mlx",
    "kivi:key_bits=4,value_bits=3,group=64,sinks=64,backend=mlx",
    "kivi:bits=8,residual=0,params=float32,backend=mlx",
    "kivi-roundtrip:bits=4,backend=mlx",
    "mlx-quantized:bits=4,group=32",
]


def prefilled(model: LoadedModel, spec: str, tokens: int, rows: int = 1) -> Arm:
    """Feed a prompt in calls as long as mlx-lm's, and its last token alone."""
    arm = Arm(model, CacheSpec.parse(spec))
    for begin in range(0, tokens - 1, 2048):
        model.model(mx.zeros((rows, min(2048, tokens - 1 - begin)), mx.int32), cache=arm.caches)
    arm.decode(mx.zeros((rows, 1), mx.int32))
    return arm


def live_bytes(arm: Arm) -> int:
    return sum(cache_bytes(cache).resident for cache in arm.caches)


@pytest.mark.parametrize("spec", SPECS)
def test_counted_bytes_are_those_of_live_arrays_at_4096_tokens(spec: str, tiny: Callable[..., LoadedModel]) -> None:
    model = tiny(num_hidden_layers=2, head_dim=64)
    counted = counted_bytes_per_token(prefilled(model, spec, 300, rows=2).caches, 4096)
    assert counted == live_bytes(prefilled(model, spec, 4096)) / 4096


@pytest.mark.parametrize("spec", ["kivi:bits=2,backend=mlx", "kivi:k4v3,g64,s64,mlx"])
def test_counted_bytes_have_the_room_that_codes_of_a_long_prompt_grow_by(spec: str) -> None:
    short, long = KIVICache(CacheSpec.parse(spec)), KIVICache(CacheSpec.parse(spec))
    for cache, calls in ((short, [1]), (long, prefill_calls(32_768))):
        for tokens in calls:
            cache.update_and_fetch(*mx.zeros((2, 1, 1, tokens, 32), mx.float16))
    assert counted_bytes_per_token([short], 32_768) == cache_bytes(long).resident / 32_768


@pytest.mark.parametrize("spec", ["full", "kivi:bits=2,backend=mlx"])
def test_layers_with_a_window_of_their_own_are_counted_with_it(spec: str, tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("gpt_oss")
    counted = counted_bytes_per_token(prefilled(model, spec, 300).caches, 1024)
    arm = prefilled(model, spec, 1024)
    assert counted == live_bytes(arm) / 1024


def test_a_state_that_does_not_grow_is_the_same_at_every_length(tiny: Callable[..., LoadedModel]) -> None:
    model = tiny("mamba")
    arm = prefilled(model, "full", 20, rows=3)
    assert counted_bytes_per_token(arm.caches, 4096) == live_bytes(prefilled(model, "full", 100)) / 4096


def test_a_cache_that_cannot_tell_is_not_guessed_at() -> None:
    assert counted_bytes_per_token([object()], 4096) is None
