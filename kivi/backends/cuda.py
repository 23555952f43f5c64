"""The CUDA backend: the project's kernels through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from kivi.backends import Availability, Name
from kivi.backends.kernel import Launch, Program
from kivi.backends.kernel_tensor import TensorBackend


class CudaTarget:
    """Compiles programs with MLX for NVIDIA's GPUs."""

    name: Name = "cuda"
    prelude = "cuda.h"
    prologue = (
        "const uint3 group = blockIdx; const uint tid = threadIdx.x, lane = tid % 32, simd = tid / 32; "
        "(void)group; (void)lane; (void)simd;"
    )
    type_names = {  # noqa: RUF012
        mx.float32: "float",
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
    }

    def build(self, program: Program) -> Launch:
        launch = mx.fast.cuda_kernel(
            name=program.name,
            input_names=list(program.inputs),
            output_names=list(program.outputs),
            header=program.header,
            source=program.source,
            ensure_row_contiguous=True,
            shared_memory=_shared_memory(program.shared_bytes),
        )
        return cast("Launch", launch)


def _shared_memory(wanted: int) -> int:
    """Return what to ask MLX for: it lifts CUDA's limit of 48 KiB a threadgroup only for 48,000 bytes and more.

    The limit also counts what the body declares itself, which is less than 16 KiB.
    """
    return wanted if wanted <= 32 * 1024 else max(wanted, 48 * 1024)


def available() -> Availability:
    """Return whether MLX sees a CUDA device, and which."""
    if not mx.cuda.is_available():
        return Availability(ok=False, reason="not run: no CUDA device")
    return Availability(ok=True, reason=f"CUDA on {mx.device_info()['device_name']}")


BACKEND = TensorBackend(CudaTarget())
