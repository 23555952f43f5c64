"""A history restored as exact keys and values equals the definition bit for bit, whatever the counts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kivi.backends import Backend
from kivi.backends import mlx as mlx_backend
from kivi.backends.host import HostTarget
from kivi.backends.kernels.backend import KernelBackend

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import Case, Exact, build

Counts = tuple[int, int, int, int]  # sinks, codes, first and last of the window

CASES = {
    "two bits": Case(codes=160, window=40, sinks=32, key_channels=128, value_channels=128),
    "three bits": Case(key_bits=3, value_bits=3, dtype=mx.bfloat16, codes=320, window=40, sinks=32, batch=2),
    "three bits, odd heads": Case(
        key_bits=3, value_bits=3, key_channels=33, value_channels=72, codes=96, window=1, dtype=mx.float32, params=mx.float32
    ),
    "four bits": Case(key_bits=4, value_bits=4, dtype=mx.bfloat16, codes=320, window=150, batch=2),
    "eight bits": Case(key_bits=8, value_bits=8, group_size=64, codes=192, sinks=64, dtype=mx.float32, params=mx.float32),
    "ragged heads": Case(key_channels=72, value_channels=80, value_bits=4, codes=96, sinks=32, window=3),
    "odd heads": Case(key_channels=33, value_channels=5, group_size=128, codes=256, window=1, params=mx.float32),
    "long sinks": Case(sinks=256, codes=64, window=129),
    "nothing quantised": Case(codes=0, sinks=32, window=9),
}


def expected(case: Case, exact: Exact, rows: list[Counts], columns: int) -> list[mx.array]:
    """Return keys and values put together from the exact twin of a history, whose capacities are Case's."""
    code_start = case.sinks
    window_start = code_start + case.capacity
    results = []
    for tokens in (exact.keys, exact.values):
        parts = []
        for row, (sinks, codes, first, last) in enumerate(rows):
            spans = [(0, sinks), (code_start, code_start + codes), (window_start + first, window_start + last)]
            side_by_side = mx.concatenate([tokens[row : row + 1, :, start:stop] for start, stop in spans], axis=2)
            parts.append(mx.pad(side_by_side, [(0, 0), (0, 0), (columns - side_by_side.shape[2], 0), (0, 0)]))
        results.append(mx.concatenate(parts).astype(case.dtype))
    return results


def assert_restores(backend: Backend, case: Case, rows: list[Counts] | None = None, columns: int = 0, seed: int = 0) -> None:
    counts = None if rows is None else [(sinks, codes, last) for sinks, codes, _, last in rows]
    _, history, exact = build(case, seed, counts)
    shared = [(case.sinks, case.codes, 0, case.window)] * case.batch
    columns = columns or case.sinks + case.codes + case.window
    start = 0 if rows is None else mx.array([first for _, _, first, _ in rows], mx.int32)
    restored = backend.restore(history, columns=columns, window_start=start)
    for actual, wanted in zip(restored, expected(case, exact, rows or shared, columns), strict=True):
        assert actual.dtype == wanted.dtype
        assert actual.shape == wanted.shape
        assert mx.array_equal(actual, wanted).item()


@pytest.mark.parametrize("name", CASES)
def test_a_history_is_restored_bit_for_bit(backend: Backend, name: str) -> None:
    assert_restores(backend, CASES[name])


def test_rows_with_their_own_counts_end_in_the_last_column(backend: Backend) -> None:
    case = Case(batch=4, codes=192, window=30, sinks=32, key_channels=72, value_channels=64)
    rows = [(32, 192, 0, 30), (0, 0, 20, 30), (32, 64, 7, 30), (0, 0, 30, 30)]
    assert_restores(backend, case, rows, columns=300)


def test_the_mlx_backend_restores_as_the_kernels_do() -> None:
    """On the CPU: on a GPU, MLX's own dequantising contracts products and sums, which shows with float32 parameters."""
    with mx.stream(mx.cpu):
        for case in CASES.values():
            assert_restores(mlx_backend.BACKEND, case)
        case = Case(batch=3, codes=192, window=30, sinks=32)
        assert_restores(mlx_backend.BACKEND, case, [(32, 192, 0, 30), (0, 0, 20, 30), (0, 0, 30, 30)], columns=254)


ANY_COUNTS = KernelBackend(HostTarget())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_counts_are_restored(data: st.DataObject) -> None:
    case = Case(batch=2, heads=1, codes=160, window=140, sinks=32, key_channels=64, value_channels=40, key_bits=4)
    rows = []
    for _ in range(case.batch):
        first = data.draw(st.integers(0, case.window))
        last = data.draw(st.integers(first, case.window))
        rows.append((data.draw(st.integers(0, case.sinks)), 32 * data.draw(st.integers(0, 5)), first, last))
    longest = max(sinks + codes + last - first for sinks, codes, first, last in rows)
    assert_restores(ANY_COUNTS, case, rows, longest + data.draw(st.integers(0 if longest else 1, 200)), seed=len(rows))


def test_columns_without_codes_are_restored(backend: Backend) -> None:
    """A history before its first group: no codes at all."""
    _, history, _ = build(Case(codes=0, window=17))
    keys, values = backend.restore(replace(history, keys=None, values=None), columns=17)
    assert mx.array_equal(keys, history.window_keys[:, :, :17]).item()
    assert mx.array_equal(values, history.window_values[:, :, :17]).item()
