"""Peers that broke the protocol: counted, and after too many breaches ignored for a while."""

from __future__ import annotations

import logging

from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

BAN_AFTER_STRIKES = 10
BAN_SECONDS = 300.0
MAX_OFFENDERS = 4_096


class Bans:
    """Mutable state: the strikes of each offender, and until when the worst are banned; `MAX_OFFENDERS` of each."""

    def __init__(self) -> None:
        self._strikes: dict[PeerId, int] = {}
        self._banned_until: dict[PeerId, float] = {}

    def strike(self, peer: PeerId, now: float) -> None:
        """Count a breach of protocol; after `BAN_AFTER_STRIKES` the peer is ignored for `BAN_SECONDS`."""
        if peer not in self._strikes and len(self._strikes) >= MAX_OFFENDERS:
            self._strikes.pop(next(iter(self._strikes)))
        self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if self._strikes[peer] >= BAN_AFTER_STRIKES:
            del self._strikes[peer]
            if len(self._banned_until) >= MAX_OFFENDERS:
                self._banned_until.pop(next(iter(self._banned_until)))
            self._banned_until[peer] = now + BAN_SECONDS
            logger.warning("Peer %s broke the protocol too often and is ignored for a while", peer[-8:])

    def is_banned(self, peer: PeerId, now: float) -> bool:
        until = self._banned_until.get(peer)
        return until is not None and now < until
