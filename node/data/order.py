"""A random order of a corpus that takes no memory: where the n-th document is, computed when it is asked for.

A Feistel network permutes the numbers below a power of four; what falls beyond the corpus is permuted again
until it falls within (cycle walking, Black and Rogaway 2002). So an order may begin anywhere, at once.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_ODD = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio, as splitmix64 mixes with
_MASK = 2**64 - 1


class DocumentOrder:
    """A permutation of the numbers below `count`, the same one for the same `seed`."""

    def __init__(self, count: int, seed: tuple[object, ...]) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        digest = hashlib.shake_256(repr(seed).encode()).digest(8 * _ROUNDS)
        self._keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]

    def __getitem__(self, place: int) -> int:
        """What stands at `place`, both below the count."""
        if not 0 <= place < self._count:
            raise IndexError(place)
        place = self._permuted(place)
        while place >= self._count:  # the power is below 4 · count: four times on average at most
            place = self._permuted(place)
        return place

    def _permuted(self, number: int) -> int:
        low = (1 << self._half) - 1
        left, right = number >> self._half, number & low
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & low)
        return left << self._half | right


def _mixed(number: int, key: int) -> int:
    """64 bits that depend on all of both (the finaliser of splitmix64)."""
    mixed = (number * _ODD + key) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 31
