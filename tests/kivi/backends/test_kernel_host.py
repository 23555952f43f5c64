"""The emulation that runs kernels on the host: threads, SIMD groups, threadgroup memory, barriers."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.backends import BackendError
from kivi.backends.host import HostTarget
from kivi.backends.kernels.program import Kernel, Prepared, Program, read_source

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)


def run(source: str, x: np.ndarray, threads: int, headers: tuple[str, ...] = ()) -> np.ndarray:
    """Run ``source``, which reads ``x`` and writes ``out`` of the same size."""
    program = Program(
        name="test_host",
        inputs=("x",),
        outputs=("out",),
        input_dtypes=(mx.float32,),
        output_dtypes=(mx.float32,),
        header=read_source("preludes", "host.h") + "".join(read_source("headers", name) for name in ("lanes.h", *headers)),
        source=f"{HostTarget.prologue}\n{source}",
    )
    (out,) = HostTarget().build(program)(
        inputs=[mx.array(x)],
        grid=(x.size, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[mx.float32],
    )
    return np.array(out)


@pytest.mark.parametrize("make", ["others may write", "another's"])
def test_no_library_is_loaded_from_a_folder_that_others_may_write_to(monkeypatch, tmp_path, make) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    if make == "others may write":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(
        RuntimeError, match=r"kernels' belongs to user \d+ with mode 7.., so others may put code there: remove it"
    ):
        run("out[tid] = x[tid];", np.zeros(32, np.float32), threads=32)
    assert not list(folder.iterdir())


def test_lanes_exchange_within_their_simd_group() -> None:
    x = np.arange(128, dtype=np.float32)
    out = run("const uint i = group.x * 64 + tid; out[i] = lanes_sum(x[i]) + lane_xor(x[i], 1) * 1000;", x, threads=64)
    expected = np.repeat(x.reshape(4, 32).sum(axis=1), 32) + (np.arange(128) ^ 1) * 1000
    np.testing.assert_array_equal(out, expected)


def test_threadgroup_memory_is_shared_after_a_barrier() -> None:
    x = np.arange(256, dtype=np.float32)
    source = "SHARED(float, held, 128); const uint i = group.x * 128; held[tid] = x[i + tid]; BARRIER();"
    source += "out[i + tid] = held[127 - tid];"
    np.testing.assert_array_equal(run(source, x, threads=128), x.reshape(2, 128)[:, ::-1].reshape(-1))


def test_memory_written_without_a_barrier_is_not_seen_in_time() -> None:
    """The emulation would not hide a missing barrier: the first SIMD group reads before the last one writes."""
    x = np.arange(1, 129, dtype=np.float32)
    source = "SHARED(float, held, 128); held[tid] = x[tid]; out[tid] = held[127 - tid];"
    assert not np.array_equal(run(source, x, threads=128), x[::-1])


@pytest.mark.parametrize(
    "source",
    ["if (tid < 64) BARRIER(); out[tid] = 0;", "if (lane < 7) out[tid] = lane_xor(x[tid], 1); else out[tid] = 0;"],
)
def test_threads_that_part_at_a_barrier_are_an_error(source: str) -> None:
    with pytest.raises(RuntimeError, match="threads parted"):
        run(source, np.zeros(128, np.float32), threads=128)


@pytest.mark.parametrize(
    "source",
    [
        "float eight[8]; load8(x + 1, eight); out[tid] = eight[0];",
        "uint two[2]; load_words<2>((const uint*)x + tid, two); out[tid] = two[0];",
        "SHARED(float, held, 64); copy_async<8>(held + 1, x); close_copies(); wait_for_copies<0>(); out[tid] = held[tid];",
    ],
    ids=["load8", "load_words", "copy_async"],
)
def test_a_vector_at_an_address_that_a_gpu_refuses_is_an_error(source: str) -> None:
    with pytest.raises(RuntimeError, match="no multiple of its size"):
        run(source, np.zeros(32, np.float32), threads=32, headers=("tensor_host.h",))


def test_what_is_copied_is_there_only_once_it_was_waited_for() -> None:
    x = np.arange(1, 33, dtype=np.float32)
    copies = "SHARED(float, held, 64); copy_async<4>(held + tid, x + tid); close_copies();"
    copies += "copy_async<4>(held + 32 + tid, x + tid, tid < 16); close_copies();"

    def copied(wait: str, start: int) -> np.ndarray:
        return run(f"{copies} {wait} out[tid] = held[{start} + tid];", x, threads=32, headers=("tensor_host.h",))

    np.testing.assert_array_equal(copied("wait_for_copies<1>();", 0), x)
    assert np.isnan(copied("wait_for_copies<1>();", 32)).all()
    np.testing.assert_array_equal(copied("wait_for_copies<0>();", 32), np.where(x <= 16, x, 0))


def test_what_a_kernel_leaves_unwritten_is_not_a_number() -> None:
    out = run("if (tid % 2) out[tid] = 1;", np.zeros(64, np.float32), threads=64)
    assert np.isnan(out[::2]).all()
    assert (out[1::2] == 1).all()


def test_sixteen_bit_floats_round_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=4096) * np.exp2(rng.integers(-30, 18, 4096)), [np.inf, -np.inf, 65519.9, 65520, -0.0]])
    x = np.pad(x.astype(np.float32), (0, -x.size % 32))
    out = run("const uint i = group.x * 32 + tid; out[i] = float(float16_t_(x[i]));", x, threads=32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, x.astype(np.float16).astype(np.float32))
    out = run("const uint i = group.x * 32 + tid; out[i] = float(bfloat16_t_(x[i]));", x, threads=32)
    np.testing.assert_array_equal(out, np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_a_body_that_does_not_compile_is_named() -> None:
    broken = Kernel("roundtrip_keys", ("x", "sizes"), ("out",), 128, ())  # without the functions that the body uses
    with pytest.raises(BackendError, match="kernel roundtrip_keys with BITS=2 failed"):
        Prepared(HostTarget(), broken, (("BITS", 2),), groups=(1, 1, 1), outputs=[((8,), mx.float32)])([mx.zeros((8,))])
