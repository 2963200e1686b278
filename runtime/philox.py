"""The random numbers of a request: Philox4x32-10 by counter, the same on a host in any language (docs/contract.md)."""

from collections.abc import Callable
from enum import IntEnum

WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a number decides: part of its counter, so that no two decisions ever share one."""

    TOKEN = 0  # plain, bonus, residual and point-mass tokens, at the absolute position of the token drawn
    DRAFT = 1  # a drafted token, at the absolute position of the round's root, index = node
    ACCEPT = 2  # the verdict on a drafted token, keyed like DRAFT


# (seed, position, purpose, index) -> u in [0, 1)
Uniform = Callable[[int, int, Purpose, int], float]


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """The number u in [0, 1) that belongs to this seed, position, purpose and index.

    Key = the 64-bit seed, low word first; counter = (position, purpose, index, 0). The first two output words x0, x1
    make one 64-bit integer, low word first as in the key; its top 53 bits make u: `((x1 << 32 | x0) >> 11) / 2**53`.

    Raises:
        ValueError: A number does not fit its bits.
    """
    words = philox4x32((position, purpose, index, 0), (seed & WORD, seed >> 32))
    return ((words[1] << 32 | words[0]) >> 11) / 2**53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Raises:
        ValueError: A word of the counter or the key does not fit 32 bits.
    """
    if any(not 0 <= word <= WORD for word in (*counter, *key)):
        raise ValueError(f"philox: expected 32-bit words, found counter {counter} and key {key}")
    # int(): numpy integers would overflow in the products
    x0, x1, x2, x3 = (int(word) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        left, right = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (right >> 32) ^ x1 ^ k0, right & WORD, (left >> 32) ^ x3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return x0, x1, x2, x3
