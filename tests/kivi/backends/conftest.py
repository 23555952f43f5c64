"""Backends under test: the kernels run as host code everywhere, and on the GPU that this machine has."""

from __future__ import annotations

import pytest

from kivi.backends import Backend, available, resolve
from kivi.backends.kernel_backend import KernelBackend
from kivi.backends.kernel_host import HostTarget
from kivi.backends.kernel_tensor import TensorBackend

HOST = KernelBackend(HostTarget())
HOST_BACKENDS = {"host": HOST, "host_tensor": TensorBackend(HOST.target)}
RUN_HERE = [*HOST_BACKENDS, *[name for name in ("metal", "cuda") if available(name).ok]]


@pytest.fixture(params=RUN_HERE)
def backend(request: pytest.FixtureRequest) -> Backend:
    return HOST_BACKENDS.get(request.param) or resolve(request.param)


@pytest.fixture
def host() -> KernelBackend:
    return HOST
