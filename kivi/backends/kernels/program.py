"""Kernel plumbing: one body, a prelude a target, compiled once a configuration.

A kernel's body (``kernels/*.body``) is written in the dialect of docs/kernels.md. Its configuration becomes macros before
it, a target's prelude comes first, and the target compiles the text: MLX for Metal and CUDA, a C++ compiler for the host.
Sequence lengths are never configuration; kernels get them in arrays, so one variant serves every length.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Protocol, cast

import mlx.core as mx

from kivi.backends import BackendError, Name

Setting = int | float | mx.Dtype
Grid = tuple[int, int, int]
Configuration = tuple[tuple[str, Setting], ...]

SIMD_WIDTH = 32
SHARED_LIMIT = 32 * 1024  # bytes of threadgroup memory that every Metal device has
SMALLEST_INPUT = 8  # MLX passes smaller Metal inputs in the constant address space, which changes the kernel's signature


@dataclass(frozen=True)
class Kernel:
    """A kernel before it is configured.

    Attributes:
        name: Name of the body's file.
        inputs, outputs: The buffers' names in the body, in order.
        threads: Threads a threadgroup, a multiple of 32.
        headers: Files of dialect functions that the body uses; ``{prelude}`` in a name is the target's prelude.
        before: A second body that runs in the threadgroups with ``group.x`` below the macro BEFORE_GROUPS.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int
    headers: tuple[str, ...]
    before: str | None = None


@dataclass(frozen=True)
class Program:
    """A configured kernel, as text for one target.

    Attributes:
        shared_bytes: Threadgroup memory that each launch asks for, beyond SHARED's; the setting SHARED_BYTES.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_dtypes: tuple[mx.Dtype, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    header: str
    source: str
    shared_bytes: int = 0


class Launch(Protocol):
    """A compiled program; ``grid`` counts threads, as MLX's kernels do."""

    def __call__(
        self,
        *,
        inputs: list[mx.array],
        grid: Grid,
        threadgroup: Grid,
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
    ) -> list[mx.array]: ...


class Target(Protocol):
    """What compiles and runs programs.

    Attributes:
        name: The backend's name in messages.
        prelude: Name of the file that defines the dialect for this target.
        prologue: First lines of every body: ``group`` (x, y, z), ``tid``, ``lane`` and ``simd``.
        type_names: The target's spelling of each dtype.
    """

    name: Name
    prelude: str
    prologue: str
    type_names: dict[mx.Dtype, str]

    def build(self, program: Program) -> Launch: ...

    def __hash__(self) -> int: ...


def build_with(make: Callable[..., object], program: Program, **options: object) -> Launch:
    """Build ``program`` with ``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel``, which take the same but for ``options``."""
    built = make(
        name=program.name,
        input_names=list(program.inputs),
        output_names=list(program.outputs),
        header=program.header,
        source=program.source,
        ensure_row_contiguous=True,
        **options,
    )
    return cast("Launch", built)


Key = tuple[Target, str, Configuration, tuple[mx.Dtype, ...]]

# At module level because caches are deep-copied and compiled kernels cannot be.
_COMPILED: dict[Key, tuple[str, Launch]] = {}
_PROVEN: set[Key] = set()
_LOCK = threading.Lock()


@lru_cache
def read_source(room: str, name: str) -> str:
    """Return the text of a file in ``bodies``, ``headers`` or ``preludes``, without comments: MLX copies it at every call."""
    text = resources.files("kivi.backends.kernels").joinpath(room, name).read_text()
    return "\n".join(filter(None, (line.split("//")[0].strip() for line in text.splitlines()))) + "\n"


def compose(
    target: Target, kernel: Kernel, settings: Configuration, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]
) -> Program:
    """Return the text of ``kernel`` for ``target``.

    The program's name ends in a digest of all of it: MLX's caches of compiled CUDA kernels, on disk too, know kernels by
    name only.
    """
    macros = {**dict(settings), "THREADS": kernel.threads}
    lines = [f"#define {name} {_spell(target, value)}" for name, value in macros.items()]
    header = "\n".join(
        [
            read_source("preludes", target.prelude),
            *lines,
            "",
            *(read_source("headers", header.format(prelude=target.prelude)) for header in kernel.headers),
        ]
    )
    body = read_source("bodies", kernel.name + ".body")
    if kernel.before is not None:
        body = f"if (group.x < BEFORE_GROUPS) {{\n{read_source('bodies', kernel.before + '.body')}}} else {{\n{body}}}\n"
    source = f"{target.prologue}\n{body}"
    digest = hashlib.sha256(repr((header, source, kernel.inputs, inputs, kernel.outputs, outputs)).encode()).hexdigest()
    name = f"kivi_{kernel.name}_{digest[:12]}"
    shared_bytes = cast("int", macros.get("SHARED_BYTES", 0))
    return Program(name, kernel.inputs, kernel.outputs, tuple(inputs), tuple(outputs), header, source, shared_bytes)


class Prepared:
    """A launch of ``kernel`` on a grid of ``groups`` threadgroups, prepared once and run as often as it is called.

    Compiles at its first call unless the configuration is compiled already, and waits for the first result of a configuration,
    so that a kernel that cannot be compiled or run fails there, by name. All else is lazy like any MLX operation.

    Args:
        target: Where it runs.
        kernel: What runs.
        settings: Its configuration.
        groups: The grid, in threadgroups.
        outputs: Shapes and dtypes of what it returns.
    """

    def __init__(
        self,
        target: Target,
        kernel: Kernel,
        settings: Configuration,
        *,
        groups: Grid,
        outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    ) -> None:
        self._target, self._kernel, self._settings = target, kernel, settings
        self._grid = (groups[0] * kernel.threads, groups[1], groups[2])
        self._threadgroup = (kernel.threads, 1, 1)
        self._shapes = [shape for shape, _ in outputs]
        self._dtypes = [dtype for _, dtype in outputs]
        self._run: Launch | None = None

    def __call__(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Run on ``inputs``, which have the same dtypes at every call.

        Raises:
            BackendError: the kernel failed to compile or to run.
        """
        try:
            if self._run is None:
                return self._first(inputs)
            return self._run(
                inputs=[array if array.size >= SMALLEST_INPUT else _enlarged(array) for array in inputs],
                grid=self._grid,
                threadgroup=self._threadgroup,
                output_shapes=self._shapes,
                output_dtypes=self._dtypes,
            )
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"backend={self._target.name}: kernel {self._kernel.name} with {_describe(self._settings)} failed: {error}"
            ) from error

    def _first(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        dtypes = [array.dtype for array in inputs]
        key: Key = (self._target, self._kernel.name, self._settings, tuple(dtypes))
        run = _compiled(key, self._target, self._kernel, self._settings, dtypes, self._dtypes)
        self._run = run
        results = self(inputs)
        if key not in _PROVEN:
            mx.eval(results)
            _PROVEN.add(key)
        return results


@lru_cache(maxsize=1024)
def constant(values: tuple[float, ...], dtype: mx.Dtype) -> mx.array:
    """Return a small input, kept because the same few are passed in every layer and step."""
    array = mx.array(values + (0,) * max(SMALLEST_INPUT - len(values), 0), dtype)
    mx.eval(array)
    return array


def compiled_variants(target: Target) -> list[str]:
    """Return the names of the programs compiled for ``target`` so far."""
    return [name for key, (name, _) in _COMPILED.items() if key[0] is target]


def _compiled(
    key: Key,
    target: Target,
    kernel: Kernel,
    settings: Configuration,
    inputs: Sequence[mx.Dtype],
    outputs: Sequence[mx.Dtype],
) -> Launch:
    with _LOCK:
        if key not in _COMPILED:
            program = compose(target, kernel, settings, inputs, outputs)
            _COMPILED[key] = program.name, target.build(program)
        return _COMPILED[key][1]


def _enlarged(array: mx.array) -> mx.array:
    return mx.concatenate([array.reshape(-1), mx.zeros((SMALLEST_INPUT,), array.dtype)])


def _spell(target: Target, value: Setting) -> str:
    if isinstance(value, mx.Dtype):
        return target.type_names[value]
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _describe(settings: Configuration) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings)
