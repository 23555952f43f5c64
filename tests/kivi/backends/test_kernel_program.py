"""Launches that are prepared once: what is done at the first call, and what at each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kivi.backends.host import HostTarget
from kivi.backends.kernels import attention as kernel_attention
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import SMALLEST_INPUT, Kernel, Launch, Prepared, Program

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import Case, build


class Noting(HostTarget):
    """Counts programs and notes the sizes of every launch's inputs; outputs are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.built = 0
        self.sizes: list[list[int]] = []

    def build(self, program: Program) -> Launch:  # noqa: ARG002
        self.built += 1

        def launch(
            *, inputs: list[mx.array], output_shapes: list[Any], output_dtypes: list[Any], **_: object
        ) -> list[mx.array]:
            self.sizes.append([array.size for array in inputs])
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


def test_small_inputs_are_enlarged_at_every_call() -> None:
    target = Noting()
    kernel = Kernel("roundtrip_keys", ("x", "sizes"), ("out",), 128, ())
    run = Prepared(target, kernel, (), groups=(1, 1, 1), outputs=[((3,), mx.float32)])
    for _ in range(3):
        assert run([mx.zeros((64,)), mx.zeros((3,))])[0].shape == (3,)
    assert target.built == 1
    assert [(large, small >= SMALLEST_INPUT) for large, small in target.sizes] == [(64, True)] * 3


@pytest.mark.parametrize("change", [None, "queries", "mask", "float32"])
def test_calls_that_differ_in_counts_alone_share_their_launches(change: str | None) -> None:
    """A step prepares nothing; another shape, a mask or another dtype does."""
    backend = KernelBackend(Noting())
    queries, history, _ = build(Case(codes=96))

    def attend(window: int, queries: mx.array = queries, mask: mx.array | None = None) -> None:
        history.window_count = window
        backend.decode_attention(queries, history, scale=0.1, causal=True, mask=mask, sinks=None)

    attend(2)
    prepared = kernel_attention.plan_portable.cache_info().misses
    match change:
        case "queries":
            attend(3, queries=mx.concatenate([queries, queries], axis=2))
        case "mask":
            attend(3, mask=mx.zeros((1, 1)))
        case "float32":
            attend(3, queries=queries.astype(mx.float32))
        case None:
            attend(3)
    assert kernel_attention.plan_portable.cache_info().misses == prepared + (change is not None)
