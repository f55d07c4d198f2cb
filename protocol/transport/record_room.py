"""Room for records that strangers store: bounded, half of it for those that came first, the rest shared by networks.

As in Bitcoin's addrman, what one network has is bounded by what the others want, whatever its number of identities:
where room is short a record takes the place of one of the network that has most. Everything is counted as it comes
and goes, so that a decision costs the same however much is kept. Pure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from protocol.windows import amount, window

T = TypeVar("T", bound=Hashable)

DRAWN = 16  # records looked at for one that gives way: a network with a sixth of the room is among them at 19 of 20
VAIN = 3  # draws that find nobody to give way, after which a record is not let in


class Room(Generic[T]):
    """A room of `most` bytes for records, each in a place of its own.

    Mutable state: the bytes and the network of each place, those of each network, and which places came first.
    """

    def __init__(self, most: int, rng: random.Random) -> None:
        self.most = most
        self.nbytes = 0
        self._rng = rng
        self._held: dict[T, tuple[int, str]] = {}
        self._of_network = Counter[str]()
        self._first: set[T] = set()  # they take half of the room at most, and do not give way
        self._first_bytes = 0
        self._rest: list[T] = []  # in no order, so that one can be drawn and taken out
        self._index: dict[T, int] = {}

    @window
    def __repr__(self) -> str:
        size = f"{amount(self.nbytes)} of {amount(self.most)}"
        return f"Size: {size} | Records: {len(self._held)}, {len(self._first)} came first"

    def __len__(self) -> int:
        return len(self._held)

    def take(self, place: T, nbytes: int, network: str) -> None:
        """Account for a record that was put into its place, or replaced the one there."""
        is_new = place not in self._held
        # of what those that came first leave, new ones get nothing: a flood would have it all
        may_be_first = place in self._first or not (is_new and self._rest)
        if not is_new:
            self._take_out(place)
        self._held[place] = nbytes, network
        if may_be_first and self._first_bytes + nbytes <= self.most / 2:
            self._first.add(place)
        else:
            self._index[place] = len(self._rest)
            self._rest.append(place)
        self._account(place, 1)

    def give_back(self, place: T) -> None:
        """Account for a record that has gone; nothing happens where there is none."""
        if place in self._held:
            self._take_out(place)
            del self._held[place]

    def giving_way(self, place: T, nbytes: int, network: str) -> list[T] | None:
        """Draw the places that give way to a record, none where there is room; None if it is not let in.

        A record displaces others of its own network, or of one that has more.
        """
        missing = self.nbytes + nbytes - self._held.get(place, (0, ""))[0] - self.most
        gone, vain = dict[T, int](), 0
        while missing > 0:
            out = self._drawn(place, gone, network) if len(gone) < len(self._rest) else None
            if out is not None:
                gone[out] = self._held[out][0]
                missing -= gone[out]
            elif (vain := vain + 1) >= VAIN:
                return None
        return list(gone)

    def _drawn(self, place: T, gone: dict[T, int], network: str) -> T | None:
        """Draw a record of the largest network among a few: large records sooner, as it is room that is wanted."""
        drawn = {self._rest[self._rng.randrange(len(self._rest))] for _ in range(DRAWN)}
        few = sorted((one for one in drawn if one != place and one not in gone), key=self._index.__getitem__)
        if not few:
            return None
        largest = max((self._held[one][1] for one in few), key=lambda name: (self._of_network[name], name))
        if largest != network and self._of_network[largest] <= self._of_network[network]:
            return None
        few = [one for one in few if self._held[one][1] == largest]
        out: T = self._rng.choices(few, [self._held[one][0] for one in few])[0]
        return out

    def _account(self, place: T, sign: int) -> None:
        nbytes, network = self._held[place]
        self.nbytes += sign * nbytes
        self._of_network[network] += sign * nbytes
        if not self._of_network[network]:
            del self._of_network[network]
        self._first_bytes += sign * nbytes * (place in self._first)

    def _take_out(self, place: T) -> None:
        self._account(place, -1)
        if place in self._first:
            self._first.discard(place)
            return
        hole, last = self._index.pop(place), self._rest.pop()
        if last != place:
            self._rest[hole], self._index[last] = last, hole
