"""The world around the peers of an in-memory network: links, faults, clocks, and records of who found each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

from bootstrap.lab.in_memory.memory_link import Faults, Link, LinkModel
from bootstrap.lab.in_memory.memory_stream import MemoryStream, Pipe, StreamLimits, Uplink
from protocol.access.admission import Admission
from protocol.errors import PeerUnreachable, RecordError, UserError
from protocol.ground import PeerId, Record
from protocol.records.records import open_record
from protocol.windows import counted, window

EPOCH = 1_700_000_000.0  # what now() says when the loop's clock says 0

_LAN = Link()
_LIMITS = StreamLimits()
_WALK_ROUND_TRIPS = 2  # of a search in the DHT; a walk of hivemind's takes about as many among 1,000 peers


class InMemoryPeer(Protocol):
    """The part of a `bootstrap.lab.in_memory.memory.MemoryTransport` that the network and other peers need."""

    admission: Admission | None

    @property
    def peer_id(self) -> PeerId: ...

    def met(self, peer: PeerId) -> None:
        """Note that a peer has connected to this one."""

    def accepts(self, peer: PeerId, protocol: str) -> bool:
        """Return whether this peer takes streams of that protocol, and of that peer."""

    def accept(self, stream: MemoryStream, protocol: str) -> None:
        """Answer a stream that a peer has opened."""

    def die(self) -> None:
        """End at once, as kill -9 does."""


class MemoryNetwork:
    """Make one inside a running loop, then one `MemoryTransport(network, identity)` for each peer.

    `link` is the same for all pairs of peers, or a function of (sender, receiver) called for each new stream.
    """

    def __init__(self, seed: int = 0, link: Link | LinkModel = _LAN, limits: StreamLimits = _LIMITS) -> None:
        self.rng = Random(seed)
        self.limits = limits
        self.faults = Faults()
        self.link: LinkModel = (lambda sender, receiver: link) if isinstance(link, Link) else link
        self._loop = asyncio.get_running_loop()
        self._running: dict[PeerId, InMemoryPeer] = {}
        self._islands: dict[PeerId, Island] = {}  # of each running peer
        self._torn: list[list[Island]] = []  # for each island that a partition split, its parts
        self._skew: dict[PeerId, float] = {}
        self._uplinks: dict[PeerId, Uplink] = {}

    @window
    def __repr__(self) -> str:
        peers, clocks = counted(len(self._running), "peer"), f"{len(self._skew)} skewed"
        return f"Running: {peers} | Clock: {self._loop.time():.1f} s, {clocks} | Faults: {self.faults!r}"

    # --- faults, for tests and simulations

    def kill(self, peer: PeerId) -> None:
        """Kill as kill -9 does: its streams break at both ends, opening one fails at once, its records run out."""
        self._running[peer].die()

    def freeze(self, peer: PeerId) -> None:
        """Freeze as SIGSTOP does: nothing reaches it or leaves it, and nobody is told. What it was sent waits."""
        self.faults.freeze(peer)

    def thaw(self, peer: PeerId) -> None:
        self.faults.thaw(peer)

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Cut the network between the groups; peers that are in none form one more. Records divide, too."""
        self._reunite()
        self.faults.partition([list(group) for group in groups])
        for island in list({id(island): island for island in self._islands.values()}.values()):
            parts = island.split(self.faults.side)
            if len(parts) > 1:
                self._torn.append(parts)
                for part in parts:
                    self._settle(part)

    def heal(self) -> None:
        """End the partition: what waited is delivered, and islands that it split are united."""
        self._reunite()
        self.faults.heal()

    def skew(self, peer: PeerId, seconds: float) -> None:
        """Set the clock of `peer` this much ahead of (or, negative, behind) the others'."""
        self._skew[peer] = seconds

    # --- what transports use

    def now(self, peer: PeerId | None = None) -> float:
        """The clock of `peer`, or the right time. Seconds since the epoch."""
        return EPOCH + self._loop.time() + (self._skew.get(peer, 0.0) if peer is not None else 0.0)

    def admit(self, transport: InMemoryPeer) -> None:
        peer = transport.peer_id
        if peer in self._running:
            raise UserError(f"Peer {peer} is running already. Give each peer a key file of its own.")
        self._running[peer] = transport
        self._uplinks[peer] = Uplink()
        self._settle(Island([peer]))

    def expel(self, peer: PeerId) -> None:
        del self._running[peer]
        self._islands.pop(peer).remove(peer)

    def running(self, peer: PeerId) -> InMemoryPeer | None:
        return self._running.get(peer)

    def join(self, a: PeerId, b: PeerId) -> None:
        """Unite the islands of two peers, if both run."""
        one, other = self._islands.get(a), self._islands.get(b)
        if one is None or other is None or one is other:
            return
        small, large = (one, other) if len(one.members) < len(other.members) else (other, one)
        large.absorb(small)
        self._islands.update(dict.fromkeys(small.members, large))

    async def travel(self, sender: PeerId, receiver: PeerId) -> None:
        """Wait as long as a small message travels: forever while a fault lies between the two."""
        link = self.link(sender, receiver)
        delay = link.latency + (self.rng.random() * link.jitter if link.jitter else 0.0)
        if delay:
            await asyncio.sleep(delay)
        while self.faults.between(sender, receiver):
            await self.faults.changed()

    async def reach(self, sender: PeerId, receiver: PeerId) -> InMemoryPeer:
        """Travel to `receiver` and return it. If it is dead: `PeerUnreachable`, after one round trip."""
        await self.travel(sender, receiver)
        transport = self._running.get(receiver)
        if transport is None:
            await self.travel(receiver, sender)
            raise PeerUnreachable(f"{receiver} does not answer")
        return transport

    async def search(self, peer: PeerId) -> Island:
        """The island of `peer`, after the time that a walk of the DHT takes. Hangs while `peer` is frozen."""
        guide = self._islands[peer].sample(self.rng)
        if self.faults.between(guide, peer) and not self.faults.frozen(peer):
            guide = peer  # a walk goes around members that do not answer
        if guide != peer or self.faults.frozen(peer):
            for _ in range(_WALK_ROUND_TRIPS):
                await self.travel(peer, guide)
                await self.travel(guide, peer)
        if peer not in self._islands:
            raise PeerUnreachable("this peer was killed")
        return self._islands[peer]

    def lets_in(self, peer: PeerId, credential: bytes, *, reads: bool = False) -> bool:
        """Return whether a member takes and, if it `reads`, gives records: the first other with rules is asked."""
        others = (self._running[p].admission for p in self._islands[peer].members if p != peer)
        rules = next((admission for admission in others if admission is not None), None)
        return rules is None or rules.admits(peer, credential, takes_part=not reads)

    def stream_pair(self, a: PeerId, b: PeerId) -> tuple[MemoryStream, MemoryStream]:
        """The ends of a new stream, at `a` and at `b`."""
        there, back = self._pipe(a, b), self._pipe(b, a)
        at_a = MemoryStream(b, there, back, self.limits, self.rng)
        at_b = MemoryStream(a, back, there, self.limits, self.rng)
        at_a.twin, at_b.twin = at_b, at_a
        return at_a, at_b

    def _pipe(self, sender: PeerId, receiver: PeerId) -> Pipe:
        link = self.link(sender, receiver)
        return Pipe(sender, receiver, link, self._uplinks[sender], self.faults, self.rng)

    # --- islands

    def _settle(self, island: Island) -> None:
        self._islands.update(dict.fromkeys(island.members, island))

    def _reunite(self) -> None:
        torn, self._torn = self._torn, []
        for parts in torn:
            alive = [next((peer for peer in part.members if peer in self._islands), None) for part in parts]
            present = [peer for peer in alive if peer is not None]
            for peer in present[1:]:
                self.join(present[0], peer)


class Island:
    """Peers that have found each other, and the records that they hold.

    A new peer is an island of its own until it connects to another peer. A partition splits an island, each
    part keeping a copy of the records; connecting and healing unite islands.
    """

    def __init__(self, members: Iterable[PeerId] = ()) -> None:
        self.members: list[PeerId] = []
        self._index: dict[PeerId, int] = {}
        self._slots: dict[bytes, dict[str, Record]] = {}  # key digest -> peer id -> its newest record
        self._add(members)

    @window
    def __repr__(self) -> str:
        return f"Members: {len(self.members)} | Keys: {len(self._slots)}"

    def put(self, digest: bytes, subkey: str, sealed: bytes, expires: float, now: float) -> bool:
        """Keep it. False, as from real peers, when it is invalid at `now` or would not outlive the one before."""
        try:
            record = open_record(digest, subkey, sealed, expires, now)
        except RecordError:
            return False
        slots = self._slots.setdefault(digest, {})
        for stale in [peer for peer, held in slots.items() if held.expires <= now]:
            del slots[stale]
        return _keep_latest(slots, record)

    def get(self, digest: bytes, now: float) -> list[Record]:
        """The records valid at `now`, sorted by peer id."""
        slots = self._slots.get(digest, {})
        return [slots[peer] for peer in sorted(slots) if slots[peer].expires > now]

    def sample(self, rng: Random) -> PeerId:
        """One member at random, at a cost that does not grow with their number."""
        return rng.choice(self.members)

    def remove(self, peer: PeerId) -> None:
        index, last = self._index.pop(peer), self.members.pop()
        if last != peer:
            self.members[index] = last
            self._index[last] = index

    def absorb(self, other: Island) -> None:
        self._add(other.members)
        self._copy_records(other)

    def split(self, side: Callable[[PeerId], int]) -> list[Island]:
        """One island for each different `side` of a member."""
        sides: dict[int, list[PeerId]] = {}
        for peer in self.members:
            sides.setdefault(side(peer), []).append(peer)
        parts = [Island(members) for members in sides.values()]
        for part in parts:
            part._copy_records(self)
        return parts

    def _add(self, members: Iterable[PeerId]) -> None:
        for peer in members:
            self._index[peer] = len(self.members)
            self.members.append(peer)

    def _copy_records(self, other: Island) -> None:
        for digest, slots in other._slots.items():
            for record in slots.values():
                _keep_latest(self._slots.setdefault(digest, {}), record)


def _keep_latest(slots: dict[str, Record], record: Record) -> bool:
    held = slots.get(record.subkey)
    if held is not None and held.expires >= record.expires:
        return False
    slots[record.subkey] = record
    return True
