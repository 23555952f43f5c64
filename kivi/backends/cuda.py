"""The CUDA backend: the project's kernels through ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx

from kivi.backends import Availability, Name
from kivi.backends.kernels.program import Launch, Program, build_with
from kivi.backends.kernels.tensor_attention import DECLARED_BYTES, TensorBackend

# KiB of shared memory that a threadgroup may have, by architecture (CUDA C++ Programming Guide, technical specifications per
# compute capability); all others since sm_80, the first with asynchronous copies and these products, have 99.
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
LEAST_SHARED_KIB = 99


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

    @cached_property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a threadgroup may have on the GPU; 0 where there are no tensor cores of this kind."""
        return shared_limit(str(mx.device_info(mx.Device(mx.gpu))["architecture"]))

    def build(self, program: Program) -> Launch:
        return build_with(mx.fast.cuda_kernel, program, shared_memory=_shared_memory(program.shared_bytes))


def shared_limit(architecture: str) -> int:
    """Return the bytes of shared memory that a threadgroup may have on an architecture, e.g. ``sm_90``; 0 before ``sm_80``."""
    number = int(architecture.removeprefix("sm_"))
    return SHARED_KIB.get(number, LEAST_SHARED_KIB if number >= min(SHARED_KIB) else 0) * 1024


def _shared_memory(wanted: int) -> int:
    """Return what to ask MLX for: it lifts CUDA's limit of 48 KiB a threadgroup only for 48,000 bytes and more.

    The limit also counts what the body declares itself, which is at most DECLARED_BYTES.
    """
    return wanted if wanted + DECLARED_BYTES <= 48 * 1024 else max(wanted, 48 * 1024)


def available() -> Availability:
    """Return whether MLX sees a CUDA device, and which."""
    if not mx.cuda.is_available():
        return Availability(ok=False, reason="not run: no CUDA device")
    return Availability(ok=True, reason=f"CUDA on {mx.device_info()['device_name']}")


BACKEND = TensorBackend(CudaTarget())
