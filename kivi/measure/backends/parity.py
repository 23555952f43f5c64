"""Parity: how far a backend is from the definition in :mod:`kivi.quantize`, on the same inputs.

Round trip and codes must be equal bit for bit. Attention on codes must lie within :data:`kivi.backends.ATTENTION_BOUND` of
exact attention on the dequantised history, relative to the largest output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from pydantic import Field

from kivi.backends import ATTENTION_BOUND, Backend, History
from kivi.cache.packed import MAX_CODE_QUERIES
from kivi.codec import Codec
from kivi.measure.backends.skip_reason import failed_or_not_run, on_gpu
from kivi.measure.records import Record
from kivi.quantize import dtype_name
from kivi.spec import CacheSpec, ParamDtype

Operation = Literal["round trip of keys", "round trip of values", "codes of keys", "codes of values", "attention on codes"]
Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: dict[Dtype, mx.Dtype] = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# On a GPU MLX's own products of float32 numbers round these to TF32's ten bits, unless MLX_ENABLE_TF32=0.
TF32_BOUND = 2e-3


class ParityError(ValueError):
    """A result that cannot be compared with the definition's."""


class Case(NamedTuple):
    """An input of a parity check: dtype, KV heads, tokens, channels."""

    dtype: Dtype
    heads: int
    tokens: int
    channels: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, self.heads, self.tokens, self.channels


class Difference(NamedTuple):
    """How two arrays of the same shape and dtype differ."""

    elements: int
    differing: int
    max_abs: float
    max_ulps: int


class ParityCheck(Record):
    """One operation of one backend on one input."""

    backend: str
    operation: Operation
    dtype: Dtype
    shape: list[int] = Field(description="batch, KV heads, tokens, channels")
    key_bits: int
    value_bits: int
    group_size: int
    param_dtype: ParamDtype
    elements: int = Field(0, description="elements compared: outputs, codes, scales and zeros")
    differing: int = Field(0, description="elements whose bits differ")
    max_abs: float = Field(0.0, description="largest absolute difference")
    max_ulps: int = Field(0, description="largest difference in units of the last place of the output's dtype")
    relative_error: float = Field(0.0, description="largest absolute difference over the largest output")
    bound: float = Field(description="largest relative error that passes; 0: bit for bit")
    not_run: str = Field("", description="skip reason: MLX's message, where MLX rejects this input on a GPU")
    failed: str = Field("", description="what the backend raised")

    @property
    def passed(self) -> bool:
        """Whether the check ran and held; a check that was not run has not failed either, see ``not_run``."""
        if self.failed or self.not_run:
            return not self.failed
        return self.differing == 0 if self.bound == 0 else self.relative_error <= self.bound

    @property
    def label(self) -> str:
        """Operation, dtype and shape."""
        return f"{self.operation}, {self.dtype} {self.shape}"

    @property
    def problem(self) -> str:
        """Why it does not hold, in a sentence; empty where it passed."""
        if self.passed:
            return ""
        apart = (
            f"{self.differing:,} of {self.elements:,} elements differ, by up to {self.max_abs:.3g} or {self.max_ulps:,} ULPs; "
            f"relative to the largest {self.relative_error:.3g}, at most {self.bound:g}"
        )
        return f"{self.label}: {self.failed or apart}"


def difference(observed: mx.array, expected: mx.array) -> Difference:
    """Compare two arrays element by element.

    ULPs of floats are steps between neighbouring representable numbers; of integers, their difference. Where exactly one of
    a pair is NaN it differs, by no finite amount, and counts in ``differing`` alone.

    Raises:
        ParityError: shapes or dtypes differ.
    """
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        raise ParityError(
            f"got {observed.shape} in {dtype_name(observed.dtype)}, expected {expected.shape} in {dtype_name(expected.dtype)}: "
            "an operation returns the shape and dtype of the definition"
        )
    ours, theirs = _ordinals(observed), _ordinals(expected)
    apart = np.abs(_values(observed) - _values(expected))
    comparable = np.isfinite(apart)
    return Difference(
        elements=observed.size,
        differing=int(np.count_nonzero(ours != theirs)),
        max_abs=float(apart[comparable].max(initial=0.0)),
        max_ulps=int(np.abs(ours - theirs)[comparable].max(initial=0)),
    )


def check_parity(backend: Backend, spec: CacheSpec, cases: Sequence[Case], *, seed: int = 0) -> Iterator[ParityCheck]:
    """Compare ``backend`` with the definition at the spec's bits, group and parameters, an operation at a time.

    Args:
        backend: What is checked.
        spec: A spec of kind ``kivi`` or ``kivi-roundtrip``; attention is checked for the packed kind only.
        cases: Inputs. Codes are packed in whole groups of tokens, so a ragged end is cut off for them.
        seed: Of the inputs.
    """
    for index, case in enumerate(cases):
        x = adversarial_input(case, spec.key_bits, spec.value_bits, seed + index)
        yield _check(backend, spec, case, "round trip of keys", _roundtrip(backend, spec.codecs.keys, x))
        yield _check(backend, spec, case, "round trip of values", _roundtrip(backend, spec.codecs.values, x))
        whole = x[..., : case.tokens // spec.group_size * spec.group_size, :]
        if whole.shape[-2]:
            yield _check(backend, spec, case, "codes of keys", _codes(backend, spec.codecs.keys, whole))
            yield _check(backend, spec, case, "codes of values", _codes(backend, spec.codecs.values, whole))
        if spec.kind == "kivi":
            yield _check(backend, spec, case, "attention on codes", _attention(backend, spec, case, seed + index))


def adversarial_input(case: Case, key_bits: int, value_bits: int, seed: int) -> mx.array:
    """Return an input on which careless kernels differ from the definition.

    Normal noise, with some channels (what keys are grouped by) and some tokens (values) of large mean, where scales suffer
    from rounding; constant, which divides by zero; half way between codes; and tiny, below the floor of the scale.
    """
    x = _normal(case.shape, seed)
    channels, tokens = mx.arange(case.channels), mx.arange(case.tokens)[:, None]
    for line, position, bits in ((channels, tokens, key_bits), (tokens, channels, value_bits)):
        halves = _half_way(case, position, bits, seed + 1)
        for index, special in enumerate((300 + x, mx.full(case.shape, 3.5), halves, x * 1e-7)):
            x = mx.where(line % 16 == 3 * index + 1, special, x)
    x = x.astype(DTYPES[case.dtype])
    mx.eval(x)
    return x


def _half_way(case: Case, position: mx.array, bits: int, seed: int) -> mx.array:
    """Return numbers that lie on codes and half way between: every group spans 0 to the largest code, so its scale is 1."""
    levels = (1 << bits) - 1
    x = mx.random.randint(0, 2 * levels + 1, case.shape, key=mx.random.key(seed)) / 2
    x = mx.where(position % 32 == 0, mx.array(0.0), x)  # every group size is a multiple of 32
    return mx.where(position % 32 == 1, mx.array(float(levels)), x)


Pairs = Callable[[], Iterator[tuple[mx.array, mx.array]]]


def _roundtrip(backend: Backend, codec: Codec, x: mx.array) -> Pairs:
    def pairs() -> Iterator[tuple[mx.array, mx.array]]:
        yield backend.group_roundtrip(x, codec), codec.roundtrip(x)

    return pairs


def _codes(backend: Backend, codec: Codec, x: mx.array) -> Pairs:
    def pairs() -> Iterator[tuple[mx.array, mx.array]]:
        yield from zip(backend.quantize(x, codec), codec.pack(codec.quantize(x)), strict=True)

    return pairs


def _attention(backend: Backend, spec: CacheSpec, case: Case, seed: int) -> Pairs:
    """Attend with 1 and with several grouped queries; all capacities hold tokens beyond their counts, which nobody may see."""

    def pairs() -> Iterator[tuple[mx.array, mx.array]]:
        history, keys, values = _history(spec, case, seed)
        scale = case.channels**-0.5
        for length in (1, MAX_CODE_QUERIES):
            queries = _normal((1, 2 * case.heads, length, case.channels), seed + 4).astype(DTYPES[case.dtype])
            observed = backend.decode_attention(queries, history, scale=scale, causal=True, mask=None, sinks=None)
            yield observed, exact_attention(queries, keys, values, scale).astype(DTYPES[case.dtype])

    return pairs


def exact_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Return causal attention in float64, on the CPU and not by MLX, whose own float32 products may be TF32's.

    Args:
        queries: ``[B, H_q, L, D_k]``, those of the last ``L`` tokens; ``H_q`` is a multiple of the KV heads.
        keys: float32 ``[B, H, N, D_k]``.
        values: float32 ``[B, H, N, D_v]``.
        scale: Factor of the scores.

    Returns:
        float32 ``[B, H_q, L, D_v]``.
    """
    q, k, v = _values(queries), _values(keys), _values(values)
    k, v = (np.repeat(part, q.shape[1] // k.shape[1], axis=1) for part in (k, v))
    length, tokens = q.shape[2], k.shape[2]
    scores = np.where(np.tri(length, tokens, tokens - length, dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return mx.array((weights @ v / weights.sum(axis=-1, keepdims=True)).astype(np.float32))


def _history(spec: CacheSpec, case: Case, seed: int) -> tuple[History, mx.array, mx.array]:
    """Return a history made from the definition alone, and its keys and values in float32, dequantised, without spare."""
    group = spec.group_size
    codes, window = max(1, case.tokens // group) * group, spec.residual_length + MAX_CODE_QUERIES
    stretches = [(spec.sink_length, 0), (codes, group), (window, group)]  # tokens that are there, and spare
    made: list[list[Any]] = []
    live: list[list[mx.array]] = []
    for side, codec in enumerate(spec.codecs):
        parts = [
            _normal((1, case.heads, count + spare, case.channels), seed + 10 * side + index).astype(DTYPES[case.dtype])
            for index, (count, spare) in enumerate(stretches)
        ]
        quantized = codec.quantize(parts[1])
        rounded = codec.dequantize(quantized, DTYPES[case.dtype], length=parts[1].shape[codec.axis])
        made.append([parts[0], codec.pack(quantized), parts[2]])
        exact = [parts[0], rounded, parts[2]]
        live.append([part[..., :count, :].astype(mx.float32) for part, (count, _) in zip(exact, stretches, strict=True)])
    (sink_keys, keys, window_keys), (sink_values, values, window_values) = made
    history = History(
        codecs=spec.codecs,
        sink_keys=sink_keys if spec.sink_length else None,
        sink_values=sink_values if spec.sink_length else None,
        keys=keys,
        values=values,
        window_keys=window_keys,
        window_values=window_values,
        sink_count=spec.sink_length,
        code_count=codes,
        window_count=window,
    )
    return history, mx.concatenate(live[0], axis=-2), mx.concatenate(live[1], axis=-2)


def _normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def _check(backend: Backend, spec: CacheSpec, case: Case, operation: Operation, pairs: Pairs) -> ParityCheck:
    bound = _attention_bound(backend, case.dtype) if operation == "attention on codes" else 0.0
    fields: dict[str, Any] = {}
    try:
        fields = _measure(pairs())
    except (RuntimeError, ValueError) as error:
        fields.update(failed_or_not_run(error, own=backend.name != "mlx"))
    return ParityCheck(
        backend=backend.name,
        operation=operation,
        dtype=case.dtype,
        shape=list(case.shape),
        key_bits=spec.key_bits,
        value_bits=spec.value_bits,
        group_size=spec.group_size,
        param_dtype=spec.param_dtype,
        bound=bound,
        **fields,
    )


def _attention_bound(backend: Backend, dtype: Dtype) -> float:
    if dtype == "float32" and backend.name == "mlx" and on_gpu():
        return TF32_BOUND
    return ATTENTION_BOUND[DTYPES[dtype]]


def _measure(pairs: Iterator[tuple[mx.array, mx.array]]) -> dict[str, Any]:
    parts, relative, finite = [], 0.0, True
    for observed, expected in pairs:
        part = difference(observed, expected)
        parts.append(part)
        finite = finite and bool(np.isfinite(_values(observed)).all())
        relative = max(relative, part.max_abs / max(float(np.abs(_values(expected)).max()), 1e-30))
    return {
        "elements": sum(part.elements for part in parts),
        "differing": sum(part.differing for part in parts),
        "max_abs": max(part.max_abs for part in parts),
        "max_ulps": max(part.max_ulps for part in parts),
        "relative_error": relative,
        "failed": "" if finite else "returned NaN or infinity for finite inputs",
    }


def _values(x: mx.array) -> np.ndarray[Any, Any]:
    # float64 holds every float32 and every uint32.
    return np.array(x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x).astype(np.float64)


def _ordinals(x: mx.array) -> np.ndarray[Any, Any]:
    """Return integers whose distance counts the representable numbers between; equal bits give equal ones."""
    if not mx.issubdtype(x.dtype, mx.floating):
        return np.array(x).astype(np.int64)
    unsigned, sign = (mx.uint32, 1 << 31) if x.dtype.size == 4 else (mx.uint16, 1 << 15)
    bits = np.array(mx.contiguous(x).view(unsigned)).astype(np.int64)
    return np.where(bits & sign, sign - 1 - bits, bits)  # -0.0 is one below 0.0, so that their bits differ
