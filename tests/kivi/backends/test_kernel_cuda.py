"""The CUDA backend's text, where there is no CUDA device; where there is one, the other tests run on it."""

from __future__ import annotations

import pytest

from kivi.backends.cuda import CudaTarget, shared_limit
from kivi.backends.kernels.program import compose
from kivi.backends.kernels.quantize import PACK_KEYS

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

SETTINGS = {"ELEMENT": mx.float16, "PARAM": mx.float32, "BITS": 2}


def test_a_program_has_its_own_name_for_every_text() -> None:
    names = {
        compose(CudaTarget(), PACK_KEYS, tuple(settings.items()), [dtype, mx.uint32], [mx.uint32, mx.float16, mx.float16]).name
        for settings in (SETTINGS, {**SETTINGS, "BITS": 4})
        for dtype in (mx.float16, mx.bfloat16)
    }
    assert len(names) == 4


@pytest.mark.parametrize(("architecture", "kib"), [("sm_75", 0), ("sm_80", 163), ("sm_86", 99), ("sm_90", 227), ("sm_120", 99)])
def test_memory_of_a_threadgroup_is_known_by_architecture(architecture: str, kib: int) -> None:
    assert shared_limit(architecture) == kib * 1024
