"""Runs kernels on the CPU: the text that ships to Metal and CUDA, compiled as C++ with an emulation of threads.

For tests on machines without a GPU. Threads are fibres that advance in step (see ``kernels/host.h``); it is some hundred
times slower than plain MLX and no backend of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from kivi.backends import Name
from kivi.backends.kernels.program import Grid, Launch, Program
from kivi.models.embedded import cache_dir

# -O1 compiles twice as fast as -O2 and runs nearly as fast; FORTIFY's longjmp refuses to change stacks.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
FAILURES = {
    1: "threads parted: some wait at a barrier that others never reach",
    2: "more than 1,024 threads a threadgroup",
    3: "a vector was read or written at an address that is no multiple of its size",
}


class HostTarget:
    """Compiles programs with the system's C++ compiler and runs them at once.

    Args:
        name: The backend that is stood in for.
        prelude: Extra prelude, for bodies that use more than the dialect.
    """

    prologue = (
        "const Uint3 group = current_group; const uint tid = current_thread, lane = tid % 32, simd = tid / 32;"
        " (void)group; (void)lane; (void)simd;"
    )
    shared_limit = 227 * 1024  # an H100's
    type_names = {  # noqa: RUF012
        mx.float32: "float",
        mx.float16: "float16_t_",
        mx.bfloat16: "bfloat16_t_",
        mx.uint32: "uint",
        mx.int32: "int",
    }

    def __init__(self, name: Name = "metal", prelude: str = "host.h") -> None:
        self.name = name
        self.prelude = prelude

    def build(self, program: Program) -> Launch:
        """Compile ``program``; libraries are kept in the cache folder by the digest of their text.

        Raises:
            RuntimeError: there is no C++ compiler, it refused the program, or others may write to the folder.
        """
        library = _compile(program.name, self.translation_unit(program))
        run = ctypes.CDLL(str(library)).run
        run.argtypes = [ctypes.POINTER(ctypes.c_void_p), *[ctypes.c_uint] * 4]

        def launch(
            *,
            inputs: list[mx.array],
            grid: Grid,
            threadgroup: Grid,
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
        ) -> list[mx.array]:
            return _run(run, inputs, grid, threadgroup, output_shapes, output_dtypes)

        return launch

    def translation_unit(self, program: Program) -> str:
        """Return the C++ text: prelude and configuration, the buffers as variables, the body, and an entry."""
        names = [*program.inputs, *program.outputs]
        dtypes = [*program.input_dtypes, *program.output_dtypes]
        qualifiers = ["const "] * len(program.inputs) + [""] * len(program.outputs)
        types = [f"{qualifier}{self.type_names[dtype]}*" for qualifier, dtype in zip(qualifiers, dtypes, strict=True)]
        buffers = [f"static {kind} {name};" for kind, name in zip(types, names, strict=True)]
        settings = [f"{name} = ({kind})buffers[{i}];" for i, (kind, name) in enumerate(zip(types, names, strict=True))]
        return "\n".join(
            [
                program.header,
                *buffers,
                f"static void body() {{\n{program.source}\n}}",
                'extern "C" int run(void** buffers, uint groups_x, uint groups_y, uint groups_z, uint threads) {',
                *settings,
                "return run_grid(body, groups_x, groups_y, groups_z, threads);\n}",
            ]
        )


def _own_folder() -> Path:
    """Return the folder of libraries, which are loaded as they are: nobody else may have put one there."""
    folder = cache_dir() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"{str(folder)!r} belongs to user {about.st_uid} with mode {stat.S_IMODE(about.st_mode):o}, so others may put code "
            "there: remove it, or set KIVI_CACHE_DIR to a folder of your own"
        )
    return folder


def _compile(name: str, text: str) -> Path:
    folder = _own_folder()
    digest = hashlib.sha256("\n".join([*FLAGS, text]).encode()).hexdigest()
    library = folder / f"{name}-{digest[:12]}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or set CXX")
    source = folder / f"{name}.{os.getpid()}.cc"
    source.write_text(text)
    unfinished = source.with_suffix(".so")
    done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(unfinished)], capture_output=True, text=True)  # noqa: S603
    source.unlink()
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    unfinished.rename(library)  # at once, so that two processes may compile the same program
    return library


def _run(
    run: Callable[..., int],
    inputs: list[mx.array],
    grid: Grid,
    threadgroup: Grid,
    output_shapes: list[tuple[int, ...]],
    output_dtypes: list[mx.Dtype],
) -> list[mx.array]:
    held = [_to_numpy(array) for array in inputs]
    results = [np.empty(shape, _storage(dtype)) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
    for result in results:
        result.view(np.uint8).fill(0xFF)  # NaN, so that what a kernel leaves unwritten is seen
    buffers = [*held, *results]
    pointers = (ctypes.c_void_p * len(buffers))(*[buffer.ctypes.data for buffer in buffers])
    groups = [-(-size // width) for size, width in zip(grid, threadgroup, strict=True)]
    failure = run(pointers, *groups, threadgroup[0])
    if failure:
        raise RuntimeError(FAILURES[failure])
    return [_to_mlx(result, dtype) for result, dtype in zip(results, output_dtypes, strict=True)]


def _storage(dtype: mx.Dtype) -> np.dtype[np.generic]:
    return np.dtype({mx.float32: np.float32, mx.uint32: np.uint32, mx.int32: np.int32}.get(dtype, np.uint16))


def _to_numpy(array: mx.array) -> np.ndarray:
    if array.dtype in (mx.float16, mx.bfloat16):
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.array(array))


def _to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    result = mx.array(array)
    return result.view(dtype) if dtype in (mx.float16, mx.bfloat16) else result
