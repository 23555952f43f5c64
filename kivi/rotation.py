"""Rotation: keys or values times an orthonormal Hadamard matrix along channels, before they are quantised.

It spreads what is large in a few channels over all of them, so that the groups' ranges shrink. Products of rotated queries
with rotated keys are those of the unrotated, and sums of rotated values are rotated sums, so a cache stores rotated numbers,
rotates its queries, and rotates the output of attention back.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

ORDERS = (1, 12, 20, 28)  # times a power of two: where MLX has a Hadamard matrix; elsewhere it aborts the process
SYMMETRIC_ORDERS = (1, 12)  # of which MLX's matrix is its own inverse


class RotationError(ValueError):
    """A number of channels that cannot be rotated; the message names it and the remedy."""


def rotate(x: mx.array) -> mx.array:
    """Return ``H x`` for every vector ``x`` along the last axis of ``[..., D]``, in the same dtype.

    Computed in float32 and rounded once, but for float16 on a GPU: there MLX's transform takes float16 as it is and rounds
    after its steps, which costs at most a unit in the last place more and saves two of three operations.

    Raises:
        RotationError: there is no Hadamard matrix of ``D`` rows here.
    """
    require_order(x.shape[-1])
    if not x.size:
        return x  # MLX's transform refuses it
    if x.dtype == mx.float32 or (x.dtype == mx.float16 and mx.default_device() == mx.gpu):
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(x.astype(mx.float32)).astype(x.dtype)


def rotate_back(x: mx.array) -> mx.array:
    """Return what :func:`rotate` made ``x`` of, ``[..., D]`` in the same dtype, rounded once more.

    Raises:
        RotationError: there is no Hadamard matrix of ``D`` rows here.
    """
    if require_order(x.shape[-1]) in SYMMETRIC_ORDERS:
        return rotate(x)
    # A product for each vector: one for all would sum in an order that depends on how many there are.
    return (_inverse(x.shape[-1]) @ x.astype(mx.float32)[..., None])[..., 0].astype(x.dtype)


@lru_cache
def require_order(channels: int) -> int:
    """Return ``m`` of ``channels = m * 2**k`` for which MLX has a Hadamard matrix.

    Raises:
        RotationError: there is none.
    """
    for order in ORDERS:
        power = channels // order
        if channels == order * power and power and not power & (power - 1):
            return order
    raise RotationError(
        f"{channels} channels cannot be rotated: MLX has Hadamard matrices of 1, 12, 20 and 28 times a power of two; "
        "use rotate=none"
    )


@lru_cache
def _inverse(channels: int) -> mx.array:
    matrix = mx.hadamard_transform(mx.eye(channels))  # whose rows are the transform's columns
    mx.eval(matrix)
    return matrix
