"""Fused decode attention on codes against float32 attention on the dequantised history."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from kivi.backends import ATTENTION_BOUND, Backend, BackendError, History
from kivi.backends.host import HostTarget
from kivi.backends.kernels import attention as kernel_attention
from kivi.backends.kernels import tensor_attention as kernel_tensor
from kivi.backends.kernels.program import compiled_variants
from kivi.backends.kernels.tensor_attention import TensorBackend

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import Case, build, reference

CASES = {
    "short": Case(),
    "float32": Case(dtype=mx.float32, params=mx.float32, codes=320, window=140),
    "bfloat16": Case(dtype=mx.bfloat16, key_bits=4, codes=256, sinks=32),
    "grouped": Case(queries_a_head=4, codes=320, sinks=32, key_channels=128, value_channels=128, value_bits=4, key_bits=4),
    "grouped_by_three": Case(queries_a_head=3, length=2, key_channels=72, value_channels=80, key_bits=4, codes=192),
    "many_queries": Case(length=8, key_channels=256, value_channels=128, group_size=128, value_bits=4, codes=384, window=129),
    "three_bits": Case(key_bits=3, value_bits=3, key_channels=72, value_channels=80, queries_a_head=3, codes=160, sinks=32),
    "three_bits_of_float32": Case(
        key_bits=3, value_bits=3, value_channels=96, group_size=64, codes=192, dtype=mx.float32, params=mx.float32
    ),
    "eight_bits": Case(key_channels=80, value_channels=96, key_bits=8, value_bits=8, group_size=64, codes=192, sinks=64),
    "wide_values": Case(value_channels=256, key_channels=96, batch=2, codes=64, window=3),
    "nothing_quantised": Case(codes=0, window=9),
    "two_queries": Case(heads=1, queries_a_head=2, key_channels=128, value_channels=96, codes=640, group_size=128, key_bits=8),
    "four_queries": Case(heads=1, queries_a_head=4, key_channels=128, value_channels=128, codes=544, sinks=32),
    "two_queries_in_three_bits": Case(
        heads=1, queries_a_head=2, key_channels=80, value_channels=96, codes=544, key_bits=3, value_bits=3
    ),
    "four_queries_in_three_bits": Case(
        heads=1,
        queries_a_head=4,
        key_channels=112,
        value_channels=128,
        codes=640,
        key_bits=3,
        value_bits=3,
        sinks=64,
        group_size=64,
    ),
    "four_queries_in_three_and_four_bits": Case(
        heads=1, queries_a_head=4, key_channels=64, value_channels=64, codes=288, key_bits=4, value_bits=3, dtype=mx.bfloat16
    ),
    "four_queries_in_eight_bits": Case(
        heads=1, queries_a_head=4, value_channels=96, key_bits=8, value_bits=8, group_size=64, codes=320
    ),
    "four_queries_in_eight_bits_of_all_channels": Case(
        heads=1, queries_a_head=4, key_channels=128, value_channels=128, key_bits=8, value_bits=8, codes=800
    ),
    "four_queries_in_bfloat16": Case(
        heads=2, queries_a_head=4, value_channels=128, key_bits=4, value_bits=4, group_size=128, codes=384, dtype=mx.bfloat16
    ),
    "eight_queries": Case(heads=1, queries_a_head=2, length=4, key_channels=96, value_channels=96, value_bits=2, codes=544),
    "long_float32": Case(
        heads=1, key_channels=64, value_channels=96, dtype=mx.float32, codes=1280, group_size=64, value_bits=8
    ),
    "long_grouped": Case(queries_a_head=3, key_channels=80, value_channels=72, codes=544, value_bits=4, dtype=mx.bfloat16),
    "long_three_bits": Case(
        heads=1, key_channels=128, value_channels=128, codes=1600, window=33, key_bits=3, value_bits=3, group_size=128
    ),
    "long_causal": Case(
        heads=1, length=5, key_channels=128, value_channels=128, codes=640, key_bits=8, value_bits=4, group_size=128
    ),
    "long": Case(heads=1, key_channels=128, value_channels=128, codes=1600, window=33, sinks=128),
}


def largest_error(actual: mx.array, expected: mx.array) -> float:
    return float((mx.max(mx.abs(actual.astype(mx.float32) - expected)) / mx.max(mx.abs(expected))).item())


@pytest.mark.parametrize("name", CASES)
def test_attention_is_within_the_bound(backend: Backend, name: str) -> None:
    case = CASES[name]
    queries, history, exact = build(case)
    kept = mx.array(queries)
    scale = case.key_channels**-0.5
    actual = backend.decode_attention(queries, history, scale=scale, causal=True, mask=None, sinks=None)
    assert actual.dtype == case.dtype
    assert largest_error(actual, reference(queries, exact, scale, causal=True)) < ATTENTION_BOUND[case.dtype]
    assert mx.array_equal(queries, kept).item()


def forget_plans() -> None:
    """Let plans be made anew, of constants that a test has changed or put back."""
    kernel_attention.plan_portable.cache_clear()
    kernel_tensor.plan.cache_clear()


@pytest.mark.parametrize(("queries_a_head", "bits"), [(1, 3), (2, 2), (4, 2), (4, 3)])
def test_a_split_may_hold_many_tiles(backend: Backend, queries_a_head: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many heads as fill a GPU there is one split; scores grow along it, so that every tile moves the maximum."""
    monkeypatch.setattr(kernel_attention, "WANTED_GROUPS", 1)
    monkeypatch.setattr(kernel_tensor, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(kernel_tensor, "IDLE", 0)
    forget_plans()
    case = Case(heads=1, queries_a_head=queries_a_head, codes=2624, window=150, key_bits=bits, value_bits=bits)
    queries, history, exact = build(case)
    columns = exact.keys.shape[2]
    ramp = mx.arange(columns, dtype=mx.float32)[None] / 64
    actual = backend.decode_attention(queries, history, scale=0.125, causal=True, mask=ramp, sinks=None)
    flat = backend.decode_attention(queries, history, scale=0.125, causal=True, mask=None, sinks=None)
    forget_plans()
    expected = reference(queries, exact, 0.125, causal=True, mask=ramp)
    assert largest_error(actual, expected) < ATTENTION_BOUND[case.dtype]
    assert largest_error(flat, reference(queries, exact, 0.125, causal=True)) < ATTENTION_BOUND[case.dtype] / 8


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_lone_split_needs_no_merge(backend: Backend, with_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many rows as fill a GPU the output is the result: normalised, with sinks, zeros where nothing is seen."""
    monkeypatch.setattr(kernel_attention, "WANTED_GROUPS", 1)
    forget_plans()
    case = Case(heads=2, queries_a_head=3, length=2, sinks=32, codes=96, key_channels=72, value_channels=40)
    queries, history, exact = build(case, seed=2)
    logits = mx.random.normal((queries.shape[1],)) * 4 if with_sinks else None
    arguments = {"scale": 0.125, "causal": True, "sinks": logits}
    actual = backend.decode_attention(queries, history, mask=None, **arguments)
    nothing = mx.zeros((1, 1, 1, exact.keys.shape[2]), mx.bool_)
    blind = backend.decode_attention(queries, history, mask=nothing, **arguments)
    forget_plans()
    expected = reference(queries, exact, 0.125, causal=True, sinks=logits)
    assert largest_error(actual, expected) < ATTENTION_BOUND[case.dtype]
    assert mx.all(blind == 0).item()


@pytest.mark.parametrize(
    "name", ["grouped", "grouped_by_three", "long", "long_grouped", "four_queries", "four_queries_in_three_bits"]
)
def test_masks_and_sinks_are_applied(backend: Backend, name: str) -> None:
    case = CASES[name]
    queries, history, exact = build(case, seed=1)
    batch, heads, length, _ = queries.shape
    columns = exact.keys.shape[2]
    scale = case.key_channels**-0.5
    some = mx.random.uniform(shape=(length, columns)) > 0.3
    masks = {
        "boolean": some,
        "boolean by row": mx.broadcast_to(some[None, None], (batch, 1, length, columns)),
        "additive by head": mx.random.normal((1, heads, 1, columns)),
    }
    for sinks in (None, mx.random.normal((heads,))):
        for kind, mask in masks.items():
            actual = backend.decode_attention(queries, history, scale=scale, causal=False, mask=mask, sinks=sinks)
            expected = reference(queries, exact, scale, causal=False, mask=mask, sinks=sinks)
            assert largest_error(actual, expected) < ATTENTION_BOUND[case.dtype], kind


def test_rows_of_a_batch_may_have_different_lengths(backend: Backend) -> None:
    case = Case(batch=3, codes=576, window=20, sinks=32)
    counts = [(32, 576, 20), (0, 64, 1), (32, 0, 12)]
    queries, history, exact = build(case, counts=counts)
    actual = backend.decode_attention(queries, history, scale=0.125, causal=True, mask=None, sinks=None)
    assert largest_error(actual, reference(queries, exact, 0.125, causal=True)) < ATTENTION_BOUND[case.dtype]


@pytest.mark.parametrize("queries_a_head", [1, 2, 4])
def test_spare_capacity_is_never_read_into_the_result(backend: Backend, queries_a_head: int) -> None:
    case = Case(codes=288, queries_a_head=queries_a_head, key_channels=128, value_channels=128, spare=3)
    queries, history, _ = build(case)
    assert history.keys is not None and history.values is not None
    keys, values = history.keys, history.values
    dirty = dataclasses.replace(
        history,
        keys=keys._replace(scale=_spoil(keys.scale, 3, 9), zero=_spoil(keys.zero, 3, 9)),
        values=values._replace(scale=_spoil(values.scale, 2, 288), zero=_spoil(values.zero, 2, 288)),
        window_keys=_spoil(history.window_keys, 2, 40),
        window_values=_spoil(history.window_values, 2, 40),
    )
    arguments = {"scale": 0.1, "causal": True, "mask": None, "sinks": None}
    clean_out = backend.decode_attention(queries, history, **arguments)
    assert mx.array_equal(backend.decode_attention(queries, dirty, **arguments), clean_out).item()


def _spoil(array: mx.array, axis: int, start: int) -> mx.array:
    """Return ``array`` with NaN from ``start`` on along ``axis``."""
    index = mx.arange(array.shape[axis]).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return mx.where(index < start, array, mx.array(float("nan"), array.dtype))


@pytest.mark.parametrize("codes", [160, 544])
def test_a_query_that_sees_nothing_gets_zeros(backend: Backend, codes: int) -> None:
    queries, history, exact = build(Case(codes=codes))
    nothing = mx.zeros((1, 1, 1, exact.keys.shape[2]), mx.bool_)
    out = backend.decode_attention(queries, history, scale=0.1, causal=True, mask=nothing, sinks=None)
    assert mx.all(out == 0).item()


def test_a_history_without_codes_is_attended_to(backend: Backend) -> None:
    queries, history, exact = build(Case(codes=0, window=17))
    bare: History = dataclasses.replace(history, keys=None, values=None)
    actual = backend.decode_attention(queries, bare, scale=0.125, causal=True, mask=None, sinks=None)
    assert largest_error(actual, reference(queries, exact, 0.125, causal=True)) < ATTENTION_BOUND[mx.float16]


@pytest.mark.parametrize("queries_a_head", [1, 4])
@pytest.mark.parametrize("codes", [96, 544])
def test_what_is_not_finite_shows_in_the_result(backend: Backend, codes: int, queries_a_head: int) -> None:
    case = Case(codes=codes, queries_a_head=queries_a_head, key_channels=128, value_channels=128)
    queries, history, _ = build(case)
    assert history.keys is not None and history.values is not None
    arguments = {"scale": 0.1, "causal": True, "mask": None, "sinks": None}
    for spoilt in (
        dataclasses.replace(history, keys=history.keys._replace(scale=_spoil(history.keys.scale, 3, 2))),
        dataclasses.replace(history, values=history.values._replace(zero=_spoil(history.values.zero, 2, 50))),
    ):
        assert mx.any(mx.isnan(backend.decode_attention(queries, spoilt, **arguments))).item()
    assert mx.all(mx.isnan(backend.decode_attention(queries * float("nan"), history, **arguments))).item()


@pytest.mark.parametrize(("bits", "channels", "most"), [(3, 2080, 2048), (8, 576, 512)])
def test_values_wider_than_a_threadgroup_are_refused(backend: Backend, bits: int, channels: int, most: int) -> None:
    queries, history, _ = build(Case(value_channels=channels, value_bits=bits, codes=32))
    with pytest.raises(BackendError, match=f"{channels} channels of values in {bits} bits: expected at most {most}"):
        backend.decode_attention(queries, history, scale=1.0, causal=True, mask=None, sinks=None)


def test_tensor_cores_are_left_where_a_threadgroup_has_too_little_memory_or_tokens_too_little_room() -> None:
    class SmallTarget(HostTarget):
        shared_limit = 90 * 1024

    def bodies(**changes: int) -> set[str]:
        target = SmallTarget()
        queries, history, _ = build(Case(heads=1, key_channels=128, value_channels=128, **changes))
        TensorBackend(target).decode_attention(queries, history, scale=0.1, causal=True, mask=None, sinks=None)
        return {name.removeprefix("kivi_").rpartition("_")[0] for name in compiled_variants(target)}

    portable = {"attention", "attention_merge"}
    tensor = {"attention_tensor", "attention_merge"}
    assert bodies(codes=480) == tensor
    assert bodies(codes=480, key_bits=3) == portable
    assert bodies(codes=736, value_bits=3) == tensor
    assert bodies(codes=480, key_bits=4) == portable
    assert bodies(codes=736, key_bits=4) == tensor
    assert bodies(codes=736, key_bits=4, value_bits=4) == portable
    assert bodies(codes=1504, key_bits=8) == portable
    assert bodies(codes=192) == portable


def test_query_heads_must_be_a_multiple_of_kv_heads(backend: Backend) -> None:
    _, history, _ = build(Case(heads=2))
    with pytest.raises(BackendError, match="3 query heads on 2 KV heads: expected a multiple"):
        backend.decode_attention(mx.zeros((1, 3, 1, 64)), history, scale=1.0, causal=True, mask=None, sinks=None)
