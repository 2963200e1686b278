"""Hadamard rotations, which spread outliers over all columns, folded into weights (QuaRot, Ashkboos et al. 2024)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The orthogonal matrix R = diag(signs) (left x right), a Kronecker product, without ever being one matrix."""

    signs: Floats  # [n], each 1 or -1
    left: Floats  # [a, a] and
    right: Floats  # [b, b], orthogonal, a b = n

    def turn(self, rows: Floats) -> Floats:
        """x R for rows x [..., n]."""
        return self._shaped(self.left.T @ self._grid(rows * self.signs) @ self.right, rows)

    def turn_back(self, rows: Floats) -> Floats:
        """x R^T for rows x [..., n]."""
        return self._shaped(self.left @ self._grid(rows) @ self.right.T, rows) * self.signs

    def _shaped(self, grid: Any, rows: Floats) -> Floats:
        shaped: Floats = grid.reshape(rows.shape)
        return shaped

    def _grid(self, rows: Floats) -> Floats:
        return rows.reshape(*rows.shape[:-1], len(self.left), len(self.right))


def random_rotation(size: int, seed: int) -> Rotation:
    """The randomised Hadamard rotation of `size`, a function of the two numbers alone.

    Raises ValueError where no Hadamard matrix of that size is known here.
    """
    left, right = _factors(size)
    numbers = np.random.Generator(np.random.Philox(key=np.array([seed, size], np.uint64)))
    signs = (1 - 2 * numbers.integers(0, 2, size)).astype(np.float32)
    return Rotation(signs, _orthogonal(left), _orthogonal(right))


def is_hadamard_order(size: int) -> bool:
    """Whether `hadamard` knows a matrix of this order."""
    return _base(size) is not None


def hadamard(order: int) -> npt.NDArray[np.int8]:
    """A matrix [order, order] of 1 and -1 whose rows are orthogonal.

    Orders 1 and 2, those of Paley's two constructions over prime fields, and any of these doubled (Sylvester):
    among them 12, 20, 28, 36 and their multiples by powers of two. Raises ValueError for others.
    """
    base = _base(order)
    if base is None:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    matrix = np.ones((1, 1), np.int8) if base == 1 else _paley(base)
    while len(matrix) < order:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.int8), matrix)
    return matrix


def _orthogonal(order: int) -> Floats:
    matrix: Floats = (hadamard(order) / np.sqrt(order)).astype(np.float32)
    return matrix


def _factors(size: int) -> tuple[int, int]:
    """Two orders whose product is `size`, as near to its root as there are."""
    for right in range(int(np.sqrt(size)), 0, -1):
        if size % right == 0 and is_hadamard_order(right) and is_hadamard_order(size // right):
            return size // right, right
    raise ValueError(f"no Hadamard matrix of order {size} is known here")


def _base(order: int) -> int | None:
    """The order that doubling starts from: 1, or one that Paley's constructions give."""
    while order > 2 and order % 4 == 0:
        if _is_prime(order - 1) or (_is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1):
            return order
        order //= 2
    return 1 if order in (1, 2) else None


def _paley(order: int) -> npt.NDArray[np.int8]:
    """Paley 1933: from the quadratic residues of order - 1, a prime 3 mod 4, or of order / 2 - 1, a prime 1 mod 4."""
    first = _is_prime(order - 1)
    prime = order - 1 if first else order // 2 - 1
    character = np.full(prime, -1, np.int8)
    character[np.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    residues = character[np.subtract.outer(np.arange(prime), np.arange(prime)) % prime]
    core = np.ones((prime + 1, prime + 1), np.int8)
    core[0, 0] = 0
    core[1:, 1:] = residues
    if first:
        core[1:, 0] = -1
        return core + np.eye(prime + 1, dtype=np.int8)
    twice = np.kron(core, np.array([[1, 1], [1, -1]], np.int8))
    return twice + np.kron(np.eye(prime + 1, dtype=np.int8), np.array([[1, -1], [-1, -1]], np.int8))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
