"""Parity: right backends pass, wrong ones are named with their numbers, skip reasons are told from failures."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kivi.attention import AttentionError
from kivi.backends import BackendError
from kivi.backends.mlx import MLXBackend
from kivi.codec import Codec, Packed
from kivi.measure.backends.parity import DTYPES, Case, ParityCheck, ParityError, check_parity, difference, exact_attention
from kivi.spec import CacheSpec

SPEC = CacheSpec.parse("kivi:bits=2,residual=16,sinks=32")
CASES = [Case("float32", 2, 96, 64), Case("float16", 1, 45, 80)]


def checks(backend: Any, spec: CacheSpec = SPEC, cases: list[Case] = CASES) -> list[ParityCheck]:
    return list(check_parity(backend, spec, cases))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["kivi:bits=2,sinks=32", "kivi:key_bits=8,value_bits=4,group=64,params=float32"])
def test_plain_mlx_equals_the_definition(dtype, text):
    found = checks(MLXBackend(), CacheSpec.parse(text), [Case(dtype, 2, 131, 72)])
    assert [check.operation for check in found] == [
        *("round trip of keys", "round trip of values", "codes of keys", "codes of values", "attention on codes")
    ]
    assert all(check.passed and not check.failed and not check.not_run and check.elements for check in found)
    assert all(check.differing == check.max_ulps == 0 for check in found if check.bound == 0)
    assert 0 < found[-1].relative_error <= found[-1].bound


def test_exact_attention_is_that_of_mlx_up_to_float32():
    """Grouped queries, and values of another size than keys; on a GPU MLX's products may be TF32's."""
    queries, keys, values = (
        mx.random.normal((2, heads, count, dim)) for heads, count, dim in ((6, 5, 24), (2, 40, 24), (2, 40, 16))
    )
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    found = exact_attention(queries, keys, values, 0.3)
    assert found.shape == (2, 6, 5, 16) and found.dtype == mx.float32
    assert mx.abs(found - expected).max().item() < (1e-5 if mx.default_device() == mx.cpu else 1e-2)


def test_attention_is_checked_for_packed_caches_only():
    found = checks(MLXBackend(), CacheSpec.parse("kivi-roundtrip:bits=2"))
    assert "attention on codes" not in {check.operation for check in found}


class OneUlpOff(MLXBackend):
    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        out = super().group_roundtrip(x, codec)
        bits = mx.contiguous(out).view(mx.uint32 if out.dtype.size == 4 else mx.uint16)
        where = mx.arange(out.size).reshape(out.shape) == 7
        return (bits ^ where.astype(bits.dtype)).view(out.dtype)


def test_one_bit_of_one_element_is_found():
    wrong = [check for check in checks(OneUlpOff()) if not check.passed]
    assert {check.operation for check in wrong} == {"round trip of keys", "round trip of values"}
    assert all(check.differing == 1 and check.max_ulps == 1 and check.max_abs > 0 for check in wrong)


class HalfUp(MLXBackend):
    """Rounds halves up instead of to even."""

    def quantize(self, x: mx.array, codec: Codec) -> Packed:
        exact = super().quantize(x, codec)
        if codec.axis == -2:
            return exact
        return Packed(super().quantize(x.astype(mx.float32) + 1e-6, codec).words, *exact[1:])


class SkipsLast(MLXBackend):
    """Attends to all but the newest token, which only attention can tell."""

    def decode_attention(self, queries: mx.array, history: Any, **options: Any) -> mx.array:
        from dataclasses import replace

        return super().decode_attention(queries, replace(history, window_count=history.window_count - 1), **options)


class ReadsSpare(MLXBackend):
    """Sees a group of codes beyond the count."""

    def decode_attention(self, queries: mx.array, history: Any, **options: Any) -> mx.array:
        from dataclasses import replace

        return super().decode_attention(queries, replace(history, code_count=history.code_count + 32), **options)


@pytest.mark.parametrize(
    ("backend", "operation"),
    [(HalfUp, "codes of values"), (SkipsLast, "attention on codes"), (ReadsSpare, "attention on codes")],
)
def test_a_wrong_backend_is_named(backend, operation):
    wrong = [check for check in checks(backend()) if not check.passed]
    assert wrong and {check.operation for check in wrong} == {operation}
    assert all(check.differing > 0 for check in wrong)


class Raises(MLXBackend):
    def __init__(self, error: Exception, name: str) -> None:
        self.error, self.name = error, name

    def quantize(self, x: mx.array, codec: Codec) -> Packed:
        if codec.axis == -2:
            raise self.error
        return super().quantize(x, codec)


WORDS = "[quantize] No implementation for problem shape"


def test_what_mlx_refuses_on_a_gpu_was_not_run(monkeypatch):
    monkeypatch.setattr("kivi.measure.backends.skip_reason.on_gpu", lambda: True)
    refused = checks(Raises(RuntimeError(WORDS), "mlx"))
    codes = [check for check in refused if check.operation == "codes of keys"]
    assert all(WORDS in check.not_run and not check.failed and check.passed for check in codes) and codes


@pytest.mark.parametrize(
    ("error", "name", "gpu"),
    [
        (RuntimeError(WORDS), "mlx", False),  # a CPU takes every shape
        (RuntimeError(WORDS), "metal", True),
        (BackendError("kernel pack_keys failed"), "mlx", True),
        (AttentionError("a model that does not attend through kivi"), "mlx", True),
        (ParityError("got another dtype"), "mlx", True),
    ],
)
def test_all_else_that_is_raised_has_failed(error, name, gpu, monkeypatch):
    monkeypatch.setattr("kivi.measure.backends.skip_reason.on_gpu", lambda: gpu)
    found = checks(Raises(error, name))
    failed = [check for check in found if check.failed]
    assert {check.operation for check in failed} == {"codes of keys"} and not any(check.passed for check in failed)
    assert all(str(error) in check.failed for check in failed) and not any(check.not_run for check in found)


class OtherDtype(MLXBackend):
    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        return super().group_roundtrip(x, codec).astype(mx.bfloat16)


def test_another_dtype_than_the_definitions_fails_wherever_it_runs(monkeypatch):
    monkeypatch.setattr("kivi.measure.backends.skip_reason.on_gpu", lambda: True)
    wrong = [check for check in checks(OtherDtype()) if not check.passed]
    assert {check.operation for check in wrong} == {"round trip of keys", "round trip of values"}
    assert all("shape and dtype of the definition" in check.failed for check in wrong)


class NotFinite(MLXBackend):
    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        return super().group_roundtrip(x, codec) * mx.array(float("nan"), x.dtype)


def test_nan_from_a_kernel_fails_and_stays_out_of_the_result():
    wrong = [check for check in checks(NotFinite()) if not check.passed]
    assert wrong and all("NaN or infinity" in check.failed for check in wrong)
    assert all(ParityCheck.model_validate_json(check.model_dump_json()) == check for check in wrong)


def test_another_shape_or_dtype_is_a_failure():
    x = mx.zeros((2, 3))
    for other in (mx.zeros((3, 2)), mx.zeros((2, 3), mx.float16)):
        with pytest.raises(ParityError, match="shape and dtype of the definition"):
            difference(other, x)


@given(st.floats(width=16, allow_nan=False, allow_infinity=False), st.integers(1, 500))
def test_ulps_count_the_representable_numbers_between(start, steps):
    numbers = [np.float16(start)]
    for _ in range(steps):
        numbers.append(np.nextafter(numbers[-1], np.float16(np.inf)))
    if not np.isfinite(numbers[-1]):
        return
    found = difference(*(mx.array(np.array([number])) for number in (numbers[-1], numbers[0])))
    crosses_zero = numbers[0] <= 0 <= numbers[-1]  # there are two zeros
    assert steps <= found.max_ulps <= steps + crosses_zero
    assert found.differing == 1 and found.max_abs == float(numbers[-1]) - float(numbers[0])


def test_equal_bits_are_equal_and_signed_zeros_are_not():
    x = mx.array([0.0, -1.5, 3e-8, 65504.0])
    assert difference(x, x) == (4, 0, 0.0, 0)
    assert difference(mx.array([-0.0]), mx.array([0.0])) == (1, 1, 0.0, 1)
    assert difference(mx.array([5], mx.uint32), mx.array([2], mx.uint32)) == (1, 1, 3.0, 3)
