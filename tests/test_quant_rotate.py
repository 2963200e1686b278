"""Hadamard matrices and the rotations made of them."""

import numpy as np
import pytest

from specedge.quant.rotate import hadamard, is_hadamard_order, random_rotation

ORDERS = [order for order in range(1, 260) if is_hadamard_order(order)]


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_orthogonal_and_all_ones(order: int) -> None:
    matrix = hadamard(order).astype(np.int64)
    assert set(np.unique(matrix)) <= {-1, 1}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.int64))


def test_the_orders_that_models_need_are_known() -> None:
    """Hidden sizes of models: powers of two and multiples of 12, 20, 28, 36, 60 by them."""
    assert {1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 44, 60, 64, 72, 128} <= {*ORDERS}
    sizes = (64, 576, 768, 896, 960, 1024, 1152, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120)
    assert all(random_rotation(size, 0).signs.shape == (size,) for size in sizes)


@pytest.mark.parametrize("order", [0, 3, 6, 10, 66, 92])
def test_other_orders_are_refused(order: int) -> None:
    assert not is_hadamard_order(order)
    with pytest.raises(ValueError, match=f"order {order}"):
        hadamard(order)


@pytest.mark.parametrize("size", [1, 2, 64, 576, 896])
def test_a_rotation_keeps_lengths_and_turns_back(size: int) -> None:
    rotation = random_rotation(size, seed=3)
    rows = np.random.default_rng(0).standard_normal((5, size)).astype(np.float32)
    turned = rotation.turn(rows)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    np.testing.assert_allclose(rotation.turn_back(turned), rows, atol=1e-5)
    matrix = rotation.turn(np.eye(size, dtype=np.float32))
    np.testing.assert_allclose(turned, rows @ matrix, atol=1e-5)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)


def test_an_outlier_is_spread_over_all_columns() -> None:
    row = np.zeros((1, 576), np.float32)
    row[0, 17] = 24
    np.testing.assert_allclose(np.abs(random_rotation(576, 0).turn(row)), 1, rtol=1e-5)


def test_the_seed_decides() -> None:
    first, same, other = (random_rotation(64, seed).signs for seed in (1, 1, 2))
    assert np.array_equal(first, same) and not np.array_equal(first, other)
