"""Counts by peer, of bounded size however many peers a node meets in its life."""

from __future__ import annotations

from protocol.transport.base import PeerId

MAX_COUNTED = 1_024


class Tally(dict[PeerId, int]):
    """Mutable state: the counts of at most `MAX_COUNTED` peers, and in `others` what those let go had together."""

    def __init__(self) -> None:
        super().__init__()
        self.others = 0

    @property
    def total(self) -> int:
        return sum(self.values()) + self.others

    def note(self, peer: PeerId) -> None:
        """One more. Where there is no place for a new peer, the one with the least count makes room."""
        if peer not in self and len(self) >= MAX_COUNTED:
            self.others += self.pop(min(self, key=self.__getitem__))
        self[peer] = self.get(peer, 0) + 1

    def largest(self, most: int) -> dict[str, int]:
        """Of the peers with the largest counts, in that order."""
        return dict(sorted(self.items(), key=lambda entry: (-entry[1], entry[0]))[:most])
