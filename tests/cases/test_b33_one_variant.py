"""B33: elsewhere, a kernel was compiled for each sequence length. Here one variant serves all lengths."""

from __future__ import annotations

import dataclasses

from kivi.backends import History
from kivi.backends.host import HostTarget
from kivi.backends.kernels.backend import KernelBackend
from kivi.backends.kernels.program import compiled_variants
from kivi.codec import Codecs

import mlx.core as mx  # isort: skip  (after kivi, which loads the BLAS)

LENGTHS = range(1, 56)
GROUP = 32
CODECS = Codecs.of(key_bits=2, value_bits=2, group_size=GROUP, param_dtype=mx.float16)


def test_one_variant_a_kernel_over_55_lengths() -> None:
    target = HostTarget()
    backend = KernelBackend(target)
    for length in LENGTHS:
        x = mx.random.normal((1, 1, length, 32))
        backend.group_roundtrip(x, CODECS.values)
        backend.group_roundtrip(x, CODECS.keys)
        backend.quantize(x, CODECS.values)
        backend.quantize(mx.repeat(x[:, :, :1], GROUP * (1 + length % 3), axis=2), CODECS.keys)
        stored = history(backend, length)
        backend.decode_attention(x[:, :, -1:], stored, scale=0.1, causal=True, mask=None, sinks=None)
        backend.restore(stored, columns=stored.code_count + stored.window_count)
    names = [name.split("_")[1:-1] for name in compiled_variants(target)]
    assert len(names) == 7, names


def history(backend: KernelBackend, length: int) -> History:
    """Return a history of ``length`` groups and ``length`` window tokens, with capacity that grows in steps."""
    capacity = GROUP * (16 + length // 16 * 16)
    empty = mx.zeros((1, 1, capacity, 32))
    window = mx.random.normal((1, 1, 64, 32))
    full = History(
        codecs=CODECS,
        sink_keys=None,
        sink_values=None,
        keys=backend.quantize(empty, CODECS.keys),
        values=backend.quantize(empty, CODECS.values),
        window_keys=window,
        window_values=window,
        sink_count=0,
        code_count=min(length, 16) * GROUP,
        window_count=length,
    )
    # Before the first group is quantised there are no codes: the same variant serves.
    return full if length % 8 else dataclasses.replace(full, keys=None, values=None, code_count=0)
