"""The rotation: orthonormal, undone by the way back, and refused where MLX would abort the process."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kivi.rotation import RotationError, require_order, rotate, rotate_back

# 20 and 28 times a power of two: MLX's matrix is not its own inverse
CHANNELS = [1, 2, 16, 24, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]
NO_CHANNELS = [0, 3, 6, 36, 72, 100, 120, 144, 576]


@pytest.mark.parametrize("channels", CHANNELS)
def test_it_is_orthonormal_and_the_way_back_undoes_it(channels):
    rows = rotate(mx.eye(channels))
    assert mx.abs(rows @ rows.T - mx.eye(channels)).max().item() < 1e-5
    assert mx.abs(mx.abs(rows) - channels**-0.5).max().item() < 1e-6
    assert mx.abs(rotate_back(rows) - mx.eye(channels)).max().item() < 1e-5


@pytest.mark.parametrize("channels", [40, 64])
def test_products_are_those_of_the_unrotated(channels):
    q, k = mx.random.normal((2, 3, 7, channels), key=mx.random.key(1))
    assert mx.abs(rotate(q) @ rotate(k).swapaxes(-1, -2) - q @ k.swapaxes(-1, -2)).max().item() < 1e-4


@pytest.mark.parametrize("channels", [64, 80])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_sixteen_bits_are_rounded_once(channels, dtype):
    x = mx.random.normal((4, 32, channels), key=mx.random.key(2)).astype(dtype)
    for turn in (rotate, rotate_back):
        assert turn(x).dtype == dtype
        assert mx.array_equal(turn(x), turn(x.astype(mx.float32)).astype(dtype))


@pytest.mark.parametrize("channels", NO_CHANNELS)
def test_what_has_no_matrix_is_refused_before_mlx_is_called(channels, monkeypatch):
    monkeypatch.setattr(mx, "hadamard_transform", None)
    for turn in (rotate, rotate_back):
        with pytest.raises(RotationError, match=rf"^{channels} channels cannot be rotated: .*use rotate=none$"):
            turn(mx.zeros((2, channels)))


@pytest.mark.parametrize("channels", [40, 64, 96, 112])
def test_a_vector_comes_out_the_same_whatever_comes_with_it(channels):
    x = mx.random.normal((2, 313, channels), key=mx.random.key(3))
    for turn in (rotate, rotate_back):
        for part in (slice(0, 1), slice(7, 20), slice(0, 312)):
            assert mx.array_equal(turn(x[:, part]), turn(x)[:, part])


def test_no_vectors_stay_none():
    for channels in (64, 80):
        assert rotate(mx.zeros((2, 0, channels))).shape == rotate_back(mx.zeros((2, 0, channels))).shape == (2, 0, channels)


def test_the_order_is_the_factor_beside_a_power_of_two():
    assert [require_order(channels) for channels in (64, 96, 80, 112)] == [1, 12, 20, 28]
