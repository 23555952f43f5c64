"""The Metal backend where there is no Metal device: its real wrapper runs, and what it launches is executed on the host.

Only ``mx.fast.metal_kernel`` is stood in for, by a recorder that compiles the very text it was given as host code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kivi.backends import BackendError, available
from kivi.backends.host import HostTarget
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import SHARED_LIMIT, Program, read_source
from kivi.backends.metal import MetalTarget
from kivi.codec import Codec

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import Case, build, reference

BYTES = {"float": 4, "uint": 4}


class Recorder:
    """Stands in for ``mx.fast.metal_kernel``: keeps what it is given and runs it on the host."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []

    def __call__(self, **built: Any) -> Any:
        self.built.append(built)

        def launch(**call: Any) -> list[mx.array]:
            self.launched.append(call)
            return self._as_host(built, call)(**call)

        return launch

    @staticmethod
    def _as_host(built: dict[str, Any], call: dict[str, Any]) -> Any:
        metal, host = MetalTarget(), HostTarget()
        header = built["header"].replace(read_source("preludes", "metal.h"), read_source("preludes", "host.h"))
        for dtype, name in metal.type_names.items():
            header = re.sub(rf"^(#define \w+) {name}$", rf"\1 {host.type_names[dtype]}", header, flags=re.MULTILINE)
        source = built["source"].replace(metal.prologue, host.prologue)
        assert "thread_position_in_threadgroup" not in source
        return host.build(
            Program(
                name="recorded_" + built["name"],
                inputs=tuple(built["input_names"]),
                outputs=tuple(built["output_names"]),
                input_dtypes=tuple(array.dtype for array in call["inputs"]),
                output_dtypes=tuple(call["output_dtypes"]),
                header=header,
                source=source,
            )
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, "metal_kernel", recorder)
    return recorder


def run_everything(backend: KernelBackend) -> tuple[mx.array, mx.array]:
    """Call every operation once and return attention's result and its reference."""
    case = Case(dtype=mx.float32, key_channels=72, value_channels=80, key_bits=4, value_bits=3, queries_a_head=2, sinks=32)
    x = mx.random.normal((1, 2, 64, 72))
    for axis in (-1, -2):
        backend.group_roundtrip(x, Codec(2, 32, axis, mx.float16))
    backend.quantize(x, Codec(3, 32, -2, mx.float16))
    backend.quantize(x, Codec(3, 64, -1, mx.float32))
    queries, history, exact = build(case)
    sinks = mx.random.normal((queries.shape[1],))
    backend.restore(history, columns=case.sinks + case.codes + case.window)
    out = backend.decode_attention(queries, history, scale=0.1, causal=True, mask=None, sinks=sinks)
    return out, reference(queries, exact, 0.1, causal=True, sinks=sinks)


def test_what_the_wrapper_launches_computes_attention(recorder: Recorder) -> None:
    out, expected = run_everything(KernelBackend(MetalTarget()))
    assert mx.max(mx.abs(out - expected)).item() < 1e-5
    assert len(recorder.built) == len(recorder.launched) == 7


def test_every_launch_fits_metal(recorder: Recorder) -> None:
    run_everything(KernelBackend(MetalTarget()))
    for built, call in zip(recorder.built, recorder.launched, strict=True):
        assert call["threadgroup"][0] % 32 == 0
        assert call["threadgroup"][0] <= 1024
        # MLX dispatches threads, not threadgroups: a partial threadgroup would leave lanes without threads.
        assert all(size % width == 0 for size, width in zip(call["grid"], call["threadgroup"], strict=True))
        # Smaller inputs would move to the constant address space, for which the bodies are not written.
        assert all(array.size >= 8 for array in call["inputs"])
        assert len(built["input_names"]) == len(call["inputs"])
        assert len(call["inputs"]) + len(call["output_dtypes"]) <= 31  # buffers that a Metal kernel may have
        assert built["compile_options"] == {"math_mode": "safe"}
        assert built["ensure_row_contiguous"]
        assert "#pragma METAL fp contract(off)" in built["header"]
        # Shapes are never baked in: MLX generates shape arguments for names that the source mentions.
        assert not re.search(r"\w+_(shape|strides|ndim)\b", built["source"])


@pytest.mark.parametrize("tile", [1, 2, 4])
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_threadgroup_memory_stays_below_the_limit(recorder: Recorder, tile: int, channels: int) -> None:
    case = Case(key_channels=channels, value_channels=channels, length=tile, codes=32, window=9, key_bits=8, value_bits=8)
    queries, history, _ = build(case)
    KernelBackend(MetalTarget()).decode_attention(queries, history, scale=1.0, causal=True, mask=None, sinks=None)
    built = recorder.built[0]
    macros = dict(re.findall(r"^#define (\w+) (\d+)$", built["header"], re.MULTILINE))
    total = 0
    for kind, count in re.findall(r"^SHARED\((\w+), \w+, (.+)\);$", built["source"], re.MULTILINE):
        expression = re.sub(r"[A-Z_]+", lambda match: macros[match.group()], count)
        assert re.fullmatch(r"[\d *+]+", expression)
        total += BYTES[kind] * eval(expression)  # noqa: S307
    assert 0 < total <= SHARED_LIMIT


def test_a_kernel_that_fails_is_named(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise RuntimeError("[metal::Device] Unable to build metal library from source")

    monkeypatch.setattr(mx.fast, "metal_kernel", refuse)
    with pytest.raises(BackendError, match=r"backend=metal: kernel roundtrip_keys with .*BITS=2.* failed: .*Unable to build"):
        x = mx.zeros((1, 1, 32, 32))
        KernelBackend(MetalTarget()).group_roundtrip(x, Codec(2, 32, -2, mx.float16))


def test_a_missing_device_is_said_in_words() -> None:
    for name, device in (("metal", "Metal"), ("cuda", "CUDA")):
        ok, reason = available(name)
        assert ok or reason == f"not run: no {device} device"
