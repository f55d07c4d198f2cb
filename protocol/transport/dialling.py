"""Dialling peers on the word of others: at which addresses, how often, and when again.

Records are free, and each may name eight addresses: without bounds whoever signs many has every reader of them dial
whom it likes. Addresses that were typed do not come here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from protocol.access.peer_limits import Allowance, PeerTable, doubled
from protocol.errors import UserError
from protocol.ground import PeerId
from protocol.records.addresses import Whereabouts, check_address, dialable, peer_id_in
from protocol.windows import counted, window

logger = logging.getLogger(__name__)

MOST_PEERS = 4_096
MOST_ADDRESSES = 8  # of each
# Addresses at once and a second, of each peer and of all together. Most peers are found by libp2p's own routing, and
# most others announce one or two addresses that can be dialled: a newcomer may meet half a hundred at once.
DIALS = (8, 8 / 60), (60, 1.0)
DIAL_BACKS = (5, 5 / 60), (60, 1.0)  # a newcomer greets some five times, and many may come at once
FIRST_PAUSE = 1.0  # seconds, twice as long with each failure
LONGEST_PAUSE = 60.0
# the same for a peer that others reach through third ones: that it cannot be dialled is what is expected
FIRST_DIRECT, LONGEST_DIRECT = 30.0, 600.0
FIRST_MEETING = (
    10.0  # the same for one with which a direct connection is arranged; p2pd rests for 5 s after a failure
)


class Dials:
    """Limits which addresses of other peers' records are dialled, how often, and when after a failure.

    Mutable state: the addresses in peers' records, who could not be reached how often and rests until when, who was
    dialled in vain beside a way through third peers, with whom a direct connection was arranged in vain, and what may
    still be dialled. Times are elapsed seconds.
    """

    def __init__(self) -> None:
        self._learned = PeerTable[list[str]](MOST_PEERS)
        self._failures = PeerTable[tuple[int, float]](MOST_PEERS)
        self._direct = PeerTable[tuple[int, float]](MOST_PEERS)
        self._meetings = PeerTable[tuple[int, float]](MOST_PEERS)
        self._dials, self._dial_backs = Allowance(*DIALS), Allowance(*DIAL_BACKS)

    @window
    def __repr__(self) -> str:
        return f"Addresses: of {counted(len(self._learned), 'peer')} | Unreachable: {len(self._failures)} of late"

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Learn the addresses in the peer's record; malformed ones are passed over."""
        usable = []
        for address in addresses[:MOST_ADDRESSES]:
            try:
                if peer_id_in(check_address(address)) == peer:
                    usable.append(address)
            except UserError as problem:
                logger.debug("The record of %s names a bad address: %s", peer, problem)
        self._learned[peer] = usable

    def take(self, peer: PeerId, here: Whereabouts, now: float) -> list[str]:
        """The addresses in the peer's record that may be dialled now; they then count as dialled."""
        return self.take_named(peer, self._learned.get(peer, []), here, now)

    def take_named(self, peer: PeerId, addresses: Sequence[str], here: Whereabouts, now: float) -> list[str]:
        """Those of a peer's addresses, with /p2p/, that may be dialled now; they then count as dialled."""
        return [address for address in dialable(addresses, here) if self._dials.take(peer, 1, now)]

    def take_direct(self, peer: PeerId, here: Whereabouts, now: float) -> list[str]:
        """The addresses at which to try a peer that is reached through third ones; none if that was done of late."""
        tries, until = self._direct.get(peer, (0, now))
        if now < until or not (addresses := self.take(peer, here, now)):
            return []
        self._direct[peer] = tries + 1, now + doubled(FIRST_DIRECT, tries, LONGEST_DIRECT)
        return addresses

    def take_meeting(self, peer: PeerId, now: float) -> bool:
        """Return whether to arrange a direct connection with a hidden peer now; it then counts as tried."""
        tries, until = self._meetings.get(peer, (0, now))
        if now < until:
            return False
        self._meetings[peer] = tries + 1, now + doubled(FIRST_MEETING, tries, LONGEST_DIRECT)
        return True

    def take_back(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer, which asks for it, may be dialled back now; it then counts as done."""
        return self._dial_backs.take(peer, 1, now)

    def rests(self, peer: PeerId, now: float) -> bool:
        """Return whether the peer could not be reached a short while ago."""
        _, until = self._failures.get(peer, (0, now))
        return now < until

    def failed(self, peer: PeerId, now: float) -> None:
        """Note that the peer cannot be reached. Several attempts at once count as one."""
        failures, until = self._failures.get(peer, (0, now))
        if now >= until:
            pause = doubled(FIRST_PAUSE, failures, LONGEST_PAUSE)
            self._failures[peer] = failures + 1, now + pause

    def succeeded(self, peer: PeerId) -> None:
        self._failures.pop(peer, None)
        self._direct.pop(peer, None)
        self._meetings.pop(peer, None)
