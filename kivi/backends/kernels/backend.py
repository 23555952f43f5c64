"""A backend made of kernels: everything but the target is the same for Metal, CUDA and the host."""

from __future__ import annotations

import mlx.core as mx

from kivi.backends import History, Name
from kivi.backends.kernels import attention as kernel_attention
from kivi.backends.kernels import quantize as kernel_quantize
from kivi.backends.kernels import restore as kernel_restore
from kivi.backends.kernels.program import Target
from kivi.codec import Codec, Packed


class KernelBackend:
    """Runs :class:`kivi.backends.Backend`'s operations as kernels on ``target``.

    Every method raises :class:`kivi.backends.BackendError`, naming the kernel, when it fails to compile or to run.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name: Name = target.name

    def group_roundtrip(self, x: mx.array, codec: Codec) -> mx.array:
        return kernel_quantize.group_roundtrip(self.target, x, codec)

    def quantize(self, x: mx.array, codec: Codec) -> Packed:
        return kernel_quantize.quantize(self.target, x, codec)

    def decode_attention(
        self,
        queries: mx.array,
        history: History,
        *,
        scale: float,
        causal: bool,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        return kernel_attention.decode_attention(
            self.target, queries, history, scale=scale, causal=causal, mask=mask, sinks=sinks
        )

    def restore(self, history: History, *, columns: int, window_start: int | mx.array = 0) -> tuple[mx.array, mx.array]:
        return kernel_restore.restore(self.target, history, columns=columns, window_start=window_start)
