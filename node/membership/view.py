"""Knows who serves what, and whom this node leaves alone: from DHT records and its own experience. Pure.

Records end by the wall clock, `now`, since their signers say when. Suspicion and the ledger are counted in elapsed
seconds, so that a clock which is set right frees nobody and locks nobody away. Each replica believes its own record
of others alone: an accusation that travels is an attack by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from node.membership.buckets import MOST, StageSize
from node.membership.ledger import Ledger, Shares, fair_shares, thinned
from node.watch.words import called_among
from protocol.access.peer_limits import PeerTable, doubled
from protocol.ground import PeerId, Record
from protocol.records.addresses import network_of
from protocol.records.announcement import Announcement
from protocol.rpc.compatibility import BOUNDARY, EXCHANGE, in_common
from protocol.version import PROTOCOL
from protocol.windows import window

SUSPECT_SECONDS = 2.0  # a peer that just failed is left alone this long, doubling with each further failure
MAX_SUSPECT_SECONDS = 60.0
MOST_FOREIGN = 256  # members of another protocol that are remembered, to tell people
MOST_APART = 4_096  # replicas with which nothing can be averaged
MOST_MEMBERS = 2 * MOST  # of a stage, that are remembered

_expiry = attrgetter("expires")


@dataclass(frozen=True)
class Member:
    peer: PeerId
    announcement: Announcement
    expires: float  # wall clock, as its record says: of two records the one that expires last counts
    kept: float = 0.0  # seconds more, for a wall clock that jumped ahead since the record was read
    sealed: bytes = field(default=b"", repr=False, compare=False)  # the record as it was signed

    @cached_property
    def network(self) -> str:
        """The network that the peer is in, by the addresses that it announces."""
        return network_of(self.announcement.addresses)


@dataclass(frozen=True)
class _Listed:
    """Members of a stage as they were put together at `since`; they are the same until `until`, both wall clock."""

    since: float
    until: float
    members: list[Member]


@dataclass(frozen=True)
class _Serving:
    """The `members` that serve and are not suspected, by peer id; it holds until a suspicion ends, by `elapsed`."""

    members: list[Member]
    until: float
    peers: list[PeerId]


@dataclass
class _Suspicion:
    since: float  # elapsed seconds, and so is `until`
    until: float
    failures: int


class View:
    """This node's view of the other members: their records, by stage, and whom it leaves alone.

    Of a large stage it holds a random sample: `most` replicas, those whose records last longest.
    """

    def __init__(self, elapsed: Callable[[], float] | None = None, most: int = MOST_MEMBERS) -> None:
        """`elapsed` is a clock in seconds that nobody sets; the running loop's when none is given."""
        self.elapsed = elapsed or (lambda: asyncio.get_running_loop().time())
        self.most = most
        self.sizes: dict[int, StageSize] = {}  # by stage
        self._members: dict[PeerId, Member] = {}
        self._by_stage: dict[int, dict[PeerId, Member]] = {}  # the same
        self._networks: dict[PeerId, str] = {}
        self._connected: dict[PeerId, str] = {}  # the networks of all whose connections were seen last
        self._suspicions: dict[PeerId, _Suspicion] = {}
        self._listed: dict[int, _Listed] = {}  # by stage, until something changes
        self._serving: dict[int, _Serving] = {}
        self.ledger = Ledger()
        self._foreign = PeerTable[Member](
            MOST_FOREIGN
        )  # of another protocol: they are not of the stages here
        self._apart = PeerTable[float](
            MOST_APART
        )  # since when the peer's program has run, as its record said
        self.noted: Callable[[Member], None] = lambda member: None  # called with each record that is newer

    @window
    def __repr__(self) -> str:
        stages = {stage: len(members) for stage, members in sorted(self._by_stage.items())}
        of_stages = ", ".join(f"{count} at stage {stage}" for stage, count in stages.items() if count)
        return f"Members: {of_stages or 'none'} | Suspected: {len(self._suspicions)} of late"

    def update(self, peer: PeerId, announcement: Announcement, expires: float) -> None:
        self.take([Member(peer, announcement, expires)])

    def introduced(self, record: Record, announcement: Announcement) -> None:
        """As `shown`, of a record as it was read."""
        self.shown(Member(record.subkey, announcement, record.expires, sealed=record.sealed))

    def shown(self, member: Member) -> None:
        """Note the record that a member has shown of itself, if this node reads its stage: strangers may name any."""
        if member.announcement.stage in self.sizes:
            self.take([member])

    def take(self, found: Iterable[Member]) -> None:
        """Take in what one look found: of two records of a peer the one that expires last counts."""
        grown, changed, members = dict[int, None](), dict[int, None](), self._members
        for member in found:
            peer = member.peer
            known = members.get(peer)
            known_or_foreign = known or self._foreign.get(peer)
            if known_or_foreign is not None and member.expires <= known_or_foreign.expires:
                continue
            stage = member.announcement.stage
            if member.announcement.protocol != PROTOCOL:
                self._foreign[peer] = member
                if known is not None:
                    self.forget([peer])
                continue
            self._foreign.pop(peer, None)  # it was started with another version
            if known is None:
                self._networks.setdefault(peer, member.network)
                grown[stage] = None
            elif known.announcement.stage != stage:
                self._drop(known)
            members[peer] = self._by_stage.setdefault(stage, {})[peer] = member
            changed[stage] = None
            self.noted(member)
        for stage in changed:
            self._listed.pop(stage, None)
        if len(members) > self.most:
            for stage in grown:
                self._make_room(stage)

    def _drop(self, member: Member) -> None:
        """Drop a record, perhaps for a newer one."""
        stage = member.announcement.stage
        del self._members[member.peer], self._by_stage[stage][member.peer]
        self._listed.pop(stage, None)

    def _make_room(self, stage: int) -> None:
        """Drop members of the network that has most, those whose records end first: a flood of identities drives out
        itself.
        """
        of_stage = self._by_stage[stage]
        too_many = len(of_stage) - self.most
        if too_many <= 0:
            return
        for out in self._first_to_go(of_stage, too_many):
            self._drop(out)
            del self._networks[out.peer]

    def _first_to_go(self, members: Mapping[PeerId, Member], count: int) -> Iterable[Member]:
        """Pick `count` of these: always the one whose record ends first of the group that has most left."""
        group_of = self._group()
        if len(set(map(group_of, members))) == len(members):  # the usual case, at each look
            return sorted(members.values(), key=_expiry)[:count]
        groups: dict[Hashable, list[Member]] = {}
        for peer, member in members.items():
            groups.setdefault(group_of(peer), []).append(member)
        heap = []
        for place, group in enumerate(groups.values()):
            group.sort(key=_expiry, reverse=True)
            heap.append((-len(group), group[-1].expires, place))
        heapify(heap)
        by_place, gone = list(groups.values()), []
        for _ in range(count):
            group = by_place[heap[0][2]]
            gone.append(group.pop())
            if group:
                heapreplace(heap, (-len(group), group[-1].expires, heap[0][2]))
            else:
                heappop(heap)
        return gone

    def replicas(self, stage: int, now: float) -> float:
        """The number of replicas of the stage: counted where all are known, else estimated."""
        size, known = self.sizes.get(stage), len(self.members(stage, now))
        return max(known, size.estimate) if size is not None and size.level else known

    def level(self, stage: int) -> int:
        """The level at which a replica of the stage should announce itself."""
        size = self.sizes.get(stage)
        return 0 if size is None else size.level

    def expire(self, now: float) -> list[Member]:
        """Drop peers whose records ran out; returns them."""
        gone = [member for member in self._members.values() if member.expires + member.kept <= now]
        for member in gone:  # no list has them any more that is asked for from now on
            del self._members[member.peer], self._by_stage[member.announcement.stage][member.peer]
            del self._networks[member.peer]
        for peer in [peer for peer in self._suspicions if peer not in self._members]:
            del self._suspicions[peer]
            self._serving.clear()
        return gone

    def forget(self, peers: Iterable[PeerId]) -> None:
        """Drop peers that are not of the run any more, whatever their records say."""
        for peer in peers:
            if (member := self._members.get(peer)) is not None:
                self._drop(member)
                del self._networks[peer]

    def peers(self) -> list[PeerId]:
        """All peers that are known, sorted."""
        return sorted(self._members)

    def clock_jumped(self, seconds: float) -> None:
        """Note a jump of the wall clock ahead: each record keeps the time it had left, until it is read again."""
        self._listed.clear()
        for member in list(self._members.values()):
            kept = replace(member, kept=member.kept + seconds)
            self._members[member.peer] = self._by_stage[member.announcement.stage][member.peer] = kept

    def knows(self, peer: PeerId) -> bool:
        return peer in self._members

    def met_at(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Note the network that the peer's connection comes from or leads to, whatever its record says."""
        network = network_of(addresses)
        if network and peer in self._networks:
            self._networks[peer] = network

    def met(self, remotes: Mapping[PeerId, Sequence[str]]) -> None:
        """Note the networks of all present connections, visitors' too."""
        self._connected = {peer: network_of(addresses) for peer, addresses in remotes.items()}
        for peer, addresses in remotes.items():
            self.met_at(peer, addresses)

    def network_at(self, peer: PeerId) -> str:
        """The network of a peer's connection, of a visitor's too; empty where it is not known yet."""
        return self._connected.get(peer, "")

    def group_of(self, peer: PeerId) -> Hashable:
        """The group with which the peer shares what its network gets: itself alone, once it is familiar."""
        return peer if self.ledger.is_familiar(peer, self.elapsed()) else self._networks.get(peer)

    def _group(self) -> Callable[[PeerId], Hashable]:
        """A function that does as `group_of`, and quickly while nobody has proved anything."""
        return self.group_of if self.ledger.knows_proofs else self._networks.get

    def shares(self, peers: Sequence[PeerId]) -> Shares:
        """The share of each of these peers when all are alike."""
        return fair_shares(peers, self._group())

    def thinned(self, peers: Sequence[PeerId], rng: random.Random) -> list[PeerId]:
        """Leave out most of those that are many of one network."""
        return thinned(peers, self._group(), rng)

    def stage_of(self, peer: PeerId, now: float) -> int | None:
        """The stage of a peer by its current record, in whatever state; None without one."""
        member = self._members.get(peer)
        return member.announcement.stage if member is not None and _is_current(member, now) else None

    def record_of(self, peer: PeerId) -> Member | None:
        """The peer's record that ends last of those that were read."""
        return self._members.get(peer)

    def called(self, peer: str) -> str:
        """Name the peer for people, as `called_among` all members that are known."""
        return called_among(
            ((each, member.announcement.name) for each, member in self._members.items()), peer
        )

    def has_finished(self, peer: PeerId) -> bool:
        """Return whether the peer does not train any more and only serves its stage's model."""
        return peer in self._members and self._members[peer].announcement.state == "finished"

    # --- other versions -----------------------------------------------------------------------

    def note_apart(self, peer: PeerId) -> bool:
        """Note that contributions of the peer and this node do not fit; returns whether that is news.

        It holds until the peer's program is started again.
        """
        member = self._members.get(peer)
        since = 0.0 if member is None else member.announcement.since
        is_news = self._apart.get(peer) != since
        self._apart[peer] = since
        return is_news

    def can_average(self, peer: PeerId) -> bool:
        """Return whether the peer's version and this one have a way to average, as far as is known."""
        member = self._members.get(peer)
        if member is None:
            return peer not in self._apart
        said = member.announcement
        return self._apart.get(peer) != said.since and bool(in_common(EXCHANGE, said.features))

    def apart(self, stage: int, now: float) -> int:
        """The number of members of the stage with which this version cannot average."""
        return sum(not self.can_average(member.peer) for member in self.members(stage, now))

    def of_other_protocols(self, now: float) -> list[Announcement]:
        """The records of members that speak another protocol than this node."""
        return [member.announcement for member in self._foreign.values() if member.expires > now]

    # --- whom to leave alone ------------------------------------------------------------------

    def most_have_finished(self, stage: int, now: float) -> bool:
        """Return whether more than half of the replicas of a stage, as they are known, do not train any more."""
        members = self.members(stage, now)
        return 2 * sum(member.announcement.state == "finished" for member in members) > len(members)

    def suspect(self, peer: PeerId, *, asked: float | None = None) -> None:
        """Leave the peer alone for a while: it did not answer or answered nonsense.

        `asked` is when, by `elapsed`. What was asked before the peer fell under suspicion failed with what made it
        suspect: of many requests at once that get no answer, only the first one counts.
        """
        known, now = self._suspicions.get(peer), self.elapsed()
        if known is not None and asked is not None and asked <= known.since:
            return
        failures = known.failures + 1 if known is not None else 1
        pause = doubled(SUSPECT_SECONDS, failures - 1, MAX_SUSPECT_SECONDS)
        self._suspicions[peer] = _Suspicion(now, now + pause, failures)
        self._serving.clear()

    def trust(self, peer: PeerId) -> None:
        """Lift the suspicion: the peer did what it was asked to."""
        if self._suspicions.pop(peer, None) is not None:
            self._serving.clear()

    def members(self, stage: int, now: float) -> list[Member]:
        """All unexpired replicas of a stage that have not left, by peer id. It is asked for each microbatch, so the
        list is kept while nothing changes; the caller does not change it.
        """
        listed = self._listed.get(stage)
        if listed is None or not listed.since <= now < listed.until:
            if listed is None or now < listed.since:
                members = [
                    member
                    for member in self._by_stage.get(stage, {}).values()
                    if member.expires + member.kept > now and member.announcement.state != "leaving"
                ]
                members.sort(key=attrgetter("peer"))
            else:  # some have run out, and nothing else has changed
                members = [member for member in listed.members if member.expires + member.kept > now]
            until = min((member.expires + member.kept for member in members), default=float("inf"))
            listed = self._listed[stage] = _Listed(now, until, members)
        return listed.members

    def knows_any(self, stage: int, now: float) -> bool:
        """Return whether there are `members` of the stage, without putting them together."""
        listed = self._listed.get(stage)
        if listed is not None and listed.since <= now < listed.until:
            return bool(listed.members)
        known = self._by_stage.get(stage, {}).values()
        return any(_is_current(member, now) and member.announcement.state != "leaving" for member in known)

    def serving(self, stage: int, now: float) -> list[PeerId]:
        """Replicas that take part in training and are not under suspicion; kept as `members` are."""
        members, elapsed = self.members(stage, now), self.elapsed()
        kept = self._serving.get(stage)
        if kept is None or kept.members is not members or elapsed >= kept.until:
            suspects = self._suspects()
            peers = [
                member.peer
                for member in members
                if member.announcement.state == "serving"
                and member.peer not in suspects
                and in_common(BOUNDARY, member.announcement.features)
            ]
            until = min(suspects.values(), default=float("inf"))
            kept = self._serving[stage] = _Serving(members, until, peers)
        return kept.peers

    def holding(self, stage: int, now: float) -> list[PeerId]:
        """Replicas that can give their stage's state: serving or finished."""
        suspects = self._suspects()
        return [
            member.peer
            for member in self.members(stage, now)
            if member.announcement.state in ("serving", "finished") and member.peer not in suspects
        ]

    def _suspects(self) -> dict[PeerId, float]:
        """The peers under suspicion, with the time until which each is left alone."""
        if not self._suspicions:
            return {}
        elapsed = self.elapsed()
        return {peer: s.until for peer, s in self._suspicions.items() if s.until > elapsed}


def _is_current(member: Member, now: float) -> bool:
    return member.expires + member.kept > now
