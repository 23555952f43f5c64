"""A fast BLAS for MLX on Linux CPUs.

MLX's Linux wheels are linked with the reference BLAS. A system OpenBLAS whose symbols are global before ``mlx.core`` is
loaded takes its place: 130 instead of 3 GFLOP/s for float32 matrix products on two x86 cores. On macOS MLX uses Accelerate.
"""

from __future__ import annotations

import ctypes
import sys

OPENBLAS = "libopenblas.so.0"
INSTALL = "apt-get install libopenblas0-pthread"


def prefer_openblas() -> str:
    """Load OpenBLAS if the machine has it; call before ``mlx.core`` is imported. Return which BLAS MLX will use."""
    if sys.platform != "linux":
        return "Accelerate"
    if "mlx.core" in sys.modules and not _is_loaded():
        return "reference (mlx.core was imported before kivi: import kivi first)"
    try:
        ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return f"reference (no OpenBLAS: {INSTALL})"
    return "OpenBLAS"


def _is_loaded() -> bool:
    with open("/proc/self/maps") as maps:  # noqa: PTH123  a pseudo-file, read once
        return any("libopenblas" in line for line in maps)


BLAS = prefer_openblas()
