"""The random numbers of a request: Philox4x32-10 by counter, the same on a host in any language (docs/contract.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Word = TypeVar("Word", int, NDArray[np.uint64])

WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_DRAFTS = 4  # purpose of `draft_uniforms`


class Purpose(IntEnum):
    """What a number decides: part of its counter, so that no two decisions ever share one."""

    TOKEN = 0  # plain, bonus, residual and point-mass tokens, at the absolute position of the token drawn
    DRAFT = 1  # a drafted token, at the absolute position of the round's root, index = node
    ACCEPT = 2  # the verdict on a drafted token, keyed like DRAFT
    NOISE = 3  # of the coupled rule: a number per token id (the index), at the absolute position of the token drawn


# (seed, position, purpose, index) -> u in [0, 1)
Uniform = Callable[[int, int, Purpose, int], float]
# (seed, position, purpose, indices [n]) -> u [n]
Uniforms = Callable[[int, int, Purpose, NDArray[np.intp]], NDArray[np.float64]]


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """The number u in [0, 1) that belongs to this seed, position, purpose and index.

    Key = the 64-bit seed, low word first; counter = (position, purpose, index, 0). The first two output words x0, x1
    make one 64-bit integer, low word first as in the key; its top 53 bits make u: `((x1 << 32 | x0) >> 11) / 2**53`.

    Raises:
        ValueError: A number does not fit its bits.
    """
    words = philox4x32((position, purpose, index, 0), (seed & WORD, seed >> 32))
    return ((words[1] << 32 | words[0]) >> 11) / 2**53


def uniforms(seed: int, position: int, purpose: Purpose, indices: NDArray[np.intp]) -> NDArray[np.float64]:
    """`uniform` for many indices at once.

    Raises:
        ValueError: A number does not fit its bits.
    """
    _check((position, purpose, int(indices.min(initial=0)), int(indices.max(initial=0))), (seed & WORD, seed >> 32))
    at, why, none = (np.full(len(indices), word, np.uint64) for word in (position, purpose, 0))
    low, high, *_ = _rounds((at, why, indices.astype(np.uint64), none), (seed & WORD, seed >> 32))
    return ((high << np.uint64(32) | low) >> np.uint64(11)) / np.float64(2**53)


def draft_uniforms(seed: int, root: int, parent: int, count: int) -> NDArray[np.float32]:
    """`count` numbers in (0, 1] for drafting in a graph, one per id of the drafter: Philox4x64-10, four times as fast.

    Key = (seed, 4); block b = 0, 1, ... has the counter (b + 1, root, parent, 0), where `root` is the absolute position of the
    round's root and `parent` numbers the root (0) and the nodes with children (1, 2, ...). A block's four 64-bit words make
    eight numbers, low halves first: (word + 1/2) / 2^32.
    """
    stream = np.random.Philox(key=np.array([seed, _DRAFTS], np.uint64), counter=np.array([0, root, parent, 0], np.uint64))
    words: NDArray[np.uint64] = stream.random_raw(-(-count // 2))
    halves = words.astype("<u8", copy=False).view("<u4")[:count]
    numbers: NDArray[np.float32] = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    return numbers


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one round; `root` is the absolute position of its root in prompt + answer, from 0."""

    seed: int
    root: int
    uniform: Uniform = uniform
    uniforms: Uniforms = uniforms

    def token(self, depth: int) -> float:
        """Decides the token that follows `depth` drafted ones."""
        return self.uniform(self.seed, self.root + depth + 1, Purpose.TOKEN, 0)

    def draft(self, node: int) -> float:
        """Decides which token node `node` of the tree carries."""
        return self.uniform(self.seed, self.root, Purpose.DRAFT, node)

    def accept(self, node: int) -> float:
        """Decides whether that token stays."""
        return self.uniform(self.seed, self.root, Purpose.ACCEPT, node)

    def noise(self, depth: int, ids: NDArray[np.intp]) -> NDArray[np.float64]:
        """One number for each of these ids as the token that follows `depth` drafted ones: the coupled rule's."""
        return self.uniforms(self.seed, self.root + depth + 1, Purpose.NOISE, ids)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Raises:
        ValueError: A word of the counter or the key does not fit 32 bits.
    """
    _check(counter, key)
    x0, x1, x2, x3 = (int(word) for word in counter)  # int(): numpy integers would overflow in the products
    return _rounds((x0, x1, x2, x3), key)


def _rounds(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds on single numbers or on arrays of 64-bit ones."""
    x0, x1, x2, x3 = counter
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1 = (right >> 32) ^ x1 ^ k0, right & WORD  # type: ignore[assignment]  # uint64 with an int stays uint64
        x2, x3 = (left >> 32) ^ x3 ^ k1, left & WORD  # type: ignore[assignment]  # as above
        k0, k1 = (k0 + _KEY_STEPS[0]) & WORD, (k1 + _KEY_STEPS[1]) & WORD
    return x0, x1, x2, x3


def _check(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    if any(not 0 <= word <= WORD for word in (*counter, *key)):
        raise ValueError(f"philox: expected 32-bit words, found counter {counter} and key {key}")
