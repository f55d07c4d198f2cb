"""The DHT as a model: records parsed once and shared, with bytes, size limits, expiry, loss and partitions.

Its figures are those of ten real p2pd, docs/notebook/scaling.md: a look takes one or two copies of a key with 32
records or more, of a smaller one all, and announcing takes no copies. `LOOK_BYTES`, `RECORD_BYTES` and
`ANNOUNCEMENT_BYTES` are fitted to that table; tests/unit/test_simulated_swarm.py holds them against it.
"""

from __future__ import annotations

import math
import random

from bootstrap.lab.simulated_swarm.event_queue import EventQueue
from bootstrap.lab.simulated_swarm.modelled_network import Host, ModelledNetwork
from node.membership.discovery import ALL_COPIES
from node.membership.view import Member
from protocol.transport.base import COPIES

RECORD_BYTES = 840  # of one record in an answer
LOOK_BYTES = 4_000  # of a search beside its records
ANNOUNCEMENT_BYTES = 9_700
MOST_RECORDS = 3_790  # of one key: what its holders refuse beyond
WHOLE_FROM = 32  # records, from which the copies that were asked for end a search
REACH = 20.0  # peers of a bucket of the routing table: each hop divides what is left by so many


def look_bytes(records: int, copies: int = COPIES) -> int:
    """Bytes of one search for a key, requests and answers."""
    return LOOK_BYTES + RECORD_BYTES * records * (copies if records >= WHOLE_FROM else ALL_COPIES)


class ModelledDht:
    """A model of the DHT that counts bytes and loses, expires and refuses records as the real one does.

    Mutable state: the records by key and peer, each with the side of a cut network on which it was stored.
    """

    def __init__(self, queue: EventQueue, network: ModelledNetwork, rng: random.Random, loss: float) -> None:
        self._queue = queue
        self._network = network
        self._random = rng.random
        self._loss = loss
        self._stored: dict[str, dict[str, tuple[Member, float, int]]] = {}
        self.refused = 0

    def seconds(self, peers: int, nbytes: int, downlink: float) -> float:
        """Seconds that a search takes among so many peers: a round trip for each hop, and its bytes."""
        hops = 1 + math.ceil(math.log(max(2, peers)) / math.log(REACH))
        return hops * self._network.round_trip + nbytes / downlink

    def get(self, reader: Host, key: str) -> list[Member]:
        """Return the records that can be reached; none where the answer is lost."""
        if self._loss and self._random() < self._loss:
            return []
        now, cut, stored = self._queue.now, self._network.cut_since, self._stored.get(key)
        if not stored:
            return []
        if cut is None:
            found = [member for member, _, _ in stored.values() if member.expires > now]
        else:
            found = [
                member
                for member, since, side in stored.values()
                if member.expires > now and (since < cut or side == reader.side)
            ]
        if len(found) < len(stored) and cut is None:
            self._stored[key] = {peer: entry for peer, entry in stored.items() if entry[0].expires > now}
        return found

    def put(self, writer: Host, key: str, member: Member) -> bool:
        """Store a record unless it is lost, and return whether it was stored: a full key takes nobody more."""
        if self._loss and self._random() < self._loss:
            return False
        stored = self._stored.setdefault(key, {})
        if member.peer not in stored and len(stored) >= MOST_RECORDS:
            now = self._queue.now
            for peer in [peer for peer, entry in stored.items() if entry[0].expires <= now]:
                del stored[peer]
            if len(stored) >= MOST_RECORDS:
                self.refused += 1
                return False
        stored[member.peer] = (member, self._queue.now, writer.side)
        return True
