"""Backends under test: the kernels run as host code everywhere, and on the GPU that this machine has."""

from __future__ import annotations

import pytest

from kivi.backends import Backend, available, resolve
from kivi.backends.kernel_backend import KernelBackend
from kivi.backends.kernel_host import HostTarget

HOST = KernelBackend(HostTarget())
RUN_HERE = ["host", *[name for name in ("metal", "cuda") if available(name).ok]]


@pytest.fixture(params=RUN_HERE)
def backend(request: pytest.FixtureRequest) -> Backend:
    return HOST if request.param == "host" else resolve(request.param)


@pytest.fixture
def host() -> KernelBackend:
    return HOST
