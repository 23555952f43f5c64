"""Backends under test: the kernels run as host code everywhere, and on the GPU that this machine has."""

from __future__ import annotations

import pytest

from kivi.backends import Backend, available, resolve
from kivi.backends.cuda import CudaTarget
from kivi.backends.host import HostTarget
from kivi.backends.kernels.attention import TENSOR_TILE_TOKENS
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.tensor_attention import TensorBackend

HOST = KernelBackend(HostTarget())
# Tensor cores are used from the first tile on, so that short cases reach them.
ALWAYS = dict.fromkeys((2, 3, 4), TENSOR_TILE_TOKENS)
BACKENDS = {
    "host": HOST,
    "host_tensor": TensorBackend(HOST.target, ALWAYS),
    "cuda_tensor": TensorBackend(CudaTarget(), ALWAYS),
}
ON_GPU = {"metal": ["metal"], "cuda": ["cuda", "cuda_tensor"]}
RUN_HERE = ["host", "host_tensor", *[name for device, names in ON_GPU.items() if available(device).ok for name in names]]


@pytest.fixture(params=RUN_HERE)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS.get(request.param) or resolve(request.param)


@pytest.fixture
def host() -> KernelBackend:
    return HOST
