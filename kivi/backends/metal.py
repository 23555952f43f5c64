"""The Metal backend: the project's kernels through ``mx.fast.metal_kernel``."""

from __future__ import annotations

import mlx.core as mx

from kivi.backends import Availability, Name
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import Launch, Program, build_with


class MetalTarget:
    """Compiles programs with MLX for Apple's GPUs, in the safe math mode (IEEE division, NaN and infinity kept)."""

    name: Name = "metal"
    prelude = "metal.h"
    # MLX declares the built-in variables that it finds in the source by these names.
    prologue = (
        "const uint3 group = threadgroup_position_in_grid; const uint tid = thread_position_in_threadgroup.x; "
        "const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup; "
        "(void)group; (void)lane; (void)simd;"
    )
    type_names = {  # noqa: RUF012
        mx.float32: "float",
        mx.float16: "float16_t",
        mx.bfloat16: "bfloat16_t",
    }

    def build(self, program: Program) -> Launch:
        return build_with(mx.fast.metal_kernel, program, compile_options={"math_mode": "safe"})


def available() -> Availability:
    """Return whether MLX sees a Metal device, and which."""
    if not mx.metal.is_available():
        return Availability(ok=False, reason="not run: no Metal device")
    return Availability(ok=True, reason=f"Metal on {mx.device_info()['device_name']}")


BACKEND = KernelBackend(MetalTarget())
