"""Shares out turns: of the last choices of a kind nobody had more than a small multiple of a fair share. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable

from node.membership.ledger import Shares
from protocol.ground import PeerId

MOST_SHARES = 2.0
REMEMBERED = 16  # choices for each peer
FREE = 2  # choices that anybody may have of them


class Turns:
    """Shares out choices of one kind, so that nobody gets more than a small multiple of a fair share."""

    def __init__(self) -> None:
        self._last: deque[PeerId] = deque()
        self._of_peer = Counter[PeerId]()

    def taken(self, peer: PeerId) -> None:
        self._last.append(peer)
        self._of_peer[peer] += 1

    def given_back(self, peer: PeerId) -> None:
        """Take back a choice that came to nothing, so that it does not count."""
        if self._of_peer[peer]:
            self._last.remove(peer)
            self._drop(peer)

    def full(
        self, shares: Shares, most_of: Callable[[PeerId], float] = lambda peer: MOST_SHARES
    ) -> set[PeerId]:
        """The peers that had `most_of` fair `shares` of the last choices; that is `MOST_SHARES` at least."""
        self._forget(REMEMBERED * len(shares.of_peer))
        share_of, least = shares.of_peer, max(FREE, MOST_SHARES * shares.least * len(self._last))
        many = [peer for peer, count in self._of_peer.items() if count >= least and peer in share_of]
        return self.crowded(shares) | {
            peer for peer in many if self._is_full(self._of_peer[peer], most_of(peer) * share_of[peer])
        }

    def crowded(self, shares: Shares) -> set[PeerId]:
        """The peers of groups of several that together had `MOST_SHARES` fair shares."""
        self._forget(REMEMBERED * len(shares.of_peer))
        sizes, of_group = shares.sizes, Counter[Hashable]()
        if len(sizes) == len(shares.group_of):
            return set()
        for peer, group in shares.group_of.items():
            of_group[group] += self._of_peer[peer]
        return {
            peer
            for peer, group in shares.group_of.items()
            if sizes[group] > 1 and self._is_full(of_group[group], MOST_SHARES * shares.of_group)
        }

    def _is_full(self, count: int, share: float) -> bool:
        return share < 1.0 and count >= max(FREE, share * len(self._last))

    def _forget(self, most: int) -> None:
        while len(self._last) > most:
            self._drop(self._last.popleft())

    def _drop(self, peer: PeerId) -> None:
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]
