"""Keeps the view of the swarm fresh: announces this node in the DHT, renews its records and reads the neighbours'."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

from node.membership.buckets import EXAMINED, StageSize
from node.membership.hearsay import ASKED, audience, hear_from_several, hear_of, overdue, show, spread_out
from node.membership.membership import Membership
from node.membership.twins import STAYS, Twins, leaves
from node.membership.view import Member, View
from node.storage.state_directory import StateDirectory
from protocol.errors import NodeFailed, NolocoError, RecordError, StateError, TransportDown, legible
from protocol.ground import PeerId
from protocol.messages.peers import Introduce
from protocol.records.addresses import network_of
from protocol.records.announcement import Announcement, bucket_key, is_sampled, record_key, stage_key
from protocol.records.lineage import UNDATED
from protocol.records.records import CLOCK_SLACK
from protocol.rpc.compatibility import Spoken, what_to_upgrade
from protocol.supervision import Supervisor, all_of
from protocol.transport.base import COPIES, Transport
from protocol.windows import counted, short, window

logger = logging.getLogger(__name__)

DHT_DEADLINE = 5.0
DIAL_DEADLINE = 5.0
POLLS_PER_LIFETIME = 6
ALL_COPIES = 5  # of a key: hivemind's default
MOST_PROTOCOLS = 5  # that are told of: a stranger may invent any
MOST_BUCKETS = 64  # that somebody reads who wants to see the whole of a stage: some 4,000 records
STAGES_AT_ONCE = 8  # that whoever wants to know several reads
LONELY_SECONDS = 2.0  # between looks while no peer of the next stage is known
ANNOUNCEMENTS_PER_LIFETIME = 3  # one may get lost and the record is still there
CLOCK_JUMP = CLOCK_SLACK  # seconds at once: more than any clock drifts between two looks
RENEWALS_PER_LIFETIME = 3


def look_at(
    view: View, run_id: str, stage: int, me: PeerId, now: float
) -> Generator[tuple[str, int], list[Member], None]:
    """One look of `me` at a stage, without the network: yields the keys to read and of how many holders, is sent
    what they hold.

    It reads all of a small stage, of a large one another bucket each time, from one holder; from all where that one
    shows too few. Who is in the sample of a large one is found in its bucket, as all others are: everybody reads the
    sample, and would ask and send to the same few.
    """
    size, found = view.sizes.setdefault(stage, StageSize()), list[Member]()
    if size.is_sample_due:
        found = yield stage_key(run_id, stage), COPIES
        view.take(member for member in found if not member.announcement.level)
        size.sampled(member.announcement.level for member in found)
    bucket = size.next_bucket(me)
    if bucket is not None:
        level, key = bucket[0], bucket_key(run_id, stage, *bucket)
        found = yield key, 1
        if size.is_short(level, len(found)):
            view.take(found)
            found = yield key, ALL_COPIES
        size.bucket_read(level, len(found))
        view.take(found)
    size.looked([member.announcement.since for member in found], now)


def is_due(view: View, stage: int, now: float) -> bool:
    """Return whether one that looks turn by turn looks at the stage in this one, see `StageSize.every`."""
    return not view.sizes.setdefault(stage, StageSize()).is_turn_left_out() or not view.knows_any(stage, now)


def keys_to_announce(run_id: str, stage: int, me: PeerId, level: int) -> list[str]:
    """The keys for a replica's record at this level: first its own place, then the sample, if it belongs there."""
    own = record_key(run_id, stage, me, level)
    return [own, stage_key(run_id, stage)] if level and is_sampled(me, level) else [own]


async def read_stage(transport: Transport, run_id: str, stage: int, view: View) -> None:
    """Bring records of one stage into the view, see `look_at`.

    Malformed ones are passed over. Takes up to three times `DHT_DEADLINE`; what was not found by then is missing.
    """
    look = look_at(view, run_id, stage, transport.peer_id, transport.now())
    with contextlib.suppress(StopIteration):
        key, copies = next(look)
        while True:
            key, copies = look.send(await _read(transport, run_id, key, stage, copies))


async def read_stages(transport: Transport, run_id: str, stages: Iterable[int], view: View) -> None:
    """Read several stages, some at a time, see `read_stage`, which says what each takes."""
    slots = asyncio.Semaphore(STAGES_AT_ONCE)

    async def one(stage: int) -> None:
        async with slots:
            await read_stage(transport, run_id, stage, view)

    await all_of(*(one(stage) for stage in stages))


async def read_whole_stage(transport: Transport, run_id: str, stage: int, view: View) -> None:
    """Read every bucket of a stage, up to `MOST_BUCKETS` of them: for those who look once, and for people."""
    await read_stage(transport, run_id, stage, view)
    size = view.sizes[stage]
    for level in [*size.levels, *size.doubted]:
        for bucket in range(min(2**level, MOST_BUCKETS)):
            found = await _read(transport, run_id, bucket_key(run_id, stage, level, bucket), stage)
            view.take(found)
            size.bucket_read(level, len(found))
            if bucket >= EXAMINED and level not in size.levels:
                break


async def _read(
    transport: Transport, run_id: str, key: str, stage: int, copies: int = COPIES
) -> list[Member]:
    """Read the records of the stage that belong under this key, by their signer's id and the level they name."""
    found = []
    for record in await transport.get(key, DHT_DEADLINE, copies=copies):
        try:
            peer, announcement = record.subkey, Announcement.read(record)
        except RecordError as error:
            logger.debug("Ignoring a record: %s", error)
            continue
        if announcement.stage == stage and key in keys_to_announce(run_id, stage, peer, announcement.level):
            transport.learn(peer, announcement.addresses)
            transport.learn_ways(peer, [PeerId(between) for between in announcement.through])
            found.append(Member(peer, announcement, record.expires, sealed=record.sealed))
    return found


class Discovery:
    """Keeps this node's record in the DHT fresh, and its view of the stages that matter to it."""

    def __init__(
        self,
        membership: Membership,
        state: StateDirectory | None,
        stages: Sequence[int],
        onward: int,
        describe: Callable[[], Announcement],
    ) -> None:
        """Reads the records of `stages`; this node's microbatches go to `onward`, unless that is none of them."""
        self._membership = membership
        self._rpc = membership.rpc
        self._transport = membership.transport
        self._run_id = membership.run_id
        self._lifetime = membership.lifetime
        self._view = membership.view
        self._events = membership.events
        self._state = state
        self._stages = stages
        self._onward = onward
        self._describe = describe
        self._announced = float("-inf")
        self._alone = self._is_known = False
        self._said = "joining"  # the state, in the last announcement
        self._said_lineage = UNDATED
        self._said_through = list[str]()  # and the peers that pass streams on to this one
        self._ahead = self._clock_ahead()
        self._twins = Twins()
        self._told_of_twin = False
        self._told_protocols = set[int]()
        self._in_book: set[str] = set()  # addresses that this life of the node has saved
        # its own, so that asking does not change what the node draws elsewhere
        self._rng = random.Random(f"{self._run_id}/{self._transport.peer_id}/hearsay")

    @window
    def __repr__(self) -> str:
        announced = "due" if self._announced == float("-inf") else f"at {self._announced:.1f} s of the loop"
        state, stages = "cut off" if self._alone else "not cut off", ", ".join(map(str, self._stages))
        peer, book = short(self._transport.peer_id), counted(len(self._in_book), "address", "addresses")
        return f"Peer: {peer}, {state} | Stages: {stages} | Announced: {announced} | Saved: {book}"

    async def announce(self) -> None:
        """Publish this node's record now; a failure is repeated by `run`."""
        said = self._describe()
        self._announced = asyncio.get_running_loop().time()
        stage, level, me = said.stage, self._view.level(said.stage), self._transport.peer_id
        self._twins.announced(said.since)
        value = said.model_copy(update={"level": level}).to_bytes()
        key, *sample = keys_to_announce(self._run_id, stage, me, level)
        stored = await self._transport.put(key, value, self._lifetime, DHT_DEADLINE)
        if (sealed := self._transport.last_put(key)) is not None:
            record, expires = sealed
            self._rpc.introduction = Introduce(stage=stage, level=level, record=record, expires=expires)
        self._is_known &= said.through == self._said_through
        self._said, self._said_lineage, self._said_through = said.state, said.lineage, said.through
        if level:  # else it is among those that are read
            self._view.update(me, said, self._transport.now() + self._lifetime)
        for key in sample:
            stored &= await self._transport.put(key, value, self._lifetime, DHT_DEADLINE)
        if not stored:
            self._announced = float("-inf")
            logger.debug("The record was not stored anywhere; it is announced again")

    async def refresh(self) -> None:
        """Read the records of the stages that matter to this node and drop those that ran out.

        Raises `NodeFailed` when another node, which was there before, runs with this one's key.
        """
        due = [stage for stage in self._stages if is_due(self._view, stage, self._transport.now())]
        for stage in due:
            await read_stage(self._transport, self._run_id, stage, self._view)
        self._rpc.introductions.go_first = any(self._view.level(stage) for stage in self._stages)
        await self._ask_for_hidden(due)
        self._look_for_twin()
        self._tell_of_other_protocols()
        for member in self._view.expire(self._transport.now()):
            if not member.announcement.level:  # else it is only that its bucket was not read again
                self._events.emit("peer-gone", peer=member.peer)
        self._view.met(await self._transport.remotes())

    def _tell_of_other_protocols(self) -> None:
        """Say once for each protocol that members of the run speak another one than this node."""
        for said in self._view.of_other_protocols(self._transport.now()):
            if said.protocol not in self._told_protocols and len(self._told_protocols) < MOST_PROTOCOLS:
                self._told_protocols.add(said.protocol)
                sentence = what_to_upgrade(Spoken(said.protocol, legible(said.program)))
                self._events.warn(
                    f"Others are in this run with which this node cannot work. {sentence}",
                    "other-protocol",
                    protocol=said.protocol,
                )

    async def _ask_for_hidden(self, stages: Sequence[int]) -> None:
        """Ask members whose records the DHT should have shown now; and somebody, where it shows no replica."""
        view, me, now = self._view, self._transport.peer_id, self._transport.now()
        late, empty = [], False
        for stage in stages:
            members = [m for m in view.members(stage, now) if m.peer != me]
            late += overdue(members, now, self._lifetime)
            empty |= not {*view.holding(stage, now)} - {
                me
            }  # a record that only joins shows nobody who has a state
        if not late and not empty:
            return
        reached = {peer: network_of(addresses) for peer, addresses in await self._transport.peers()}
        asked = self._rng.sample(late, min(ASKED, len(late)))
        asked += spread_out(reached, self._rng)[: ASKED if empty else 1]
        await hear_of(self._membership, list(dict.fromkeys(asked)), self._stages)

    async def ask_around(self) -> None:
        """Ask members of several networks who serves what, whatever records show; see `hear_from_several`."""
        await hear_from_several(self._membership)

    async def run(self) -> None:
        """Read, announce and reconnect for ever.

        A record that is renewed is read before: whoever else renews it, with this node's key, is seen so.
        """
        while True:
            try:
                self._notice_clock()
                due = self._announced + self._lifetime / ANNOUNCEMENTS_PER_LIFETIME
                said = self._describe()
                if said.lineage != self._said_lineage or said.through != self._said_through:
                    due = float("-inf")  # others average with this node, or not, by that, and reach it so
                is_urgent = math.isinf(due)
                if not is_urgent:
                    await self.refresh()
                if asyncio.get_running_loop().time() >= due:
                    await self.announce()
                if is_urgent:
                    await self.refresh()
                await self._make_known()
                await self._keep_connected()
            except NodeFailed:
                raise
            except (TransportDown, StateError) as problem:
                logger.warning("%s", problem)
            except NolocoError as problem:
                logger.debug("Discovery: %s", problem)
            await asyncio.sleep(min(self._lifetime / POLLS_PER_LIFETIME, self._patience()))

    async def _make_known(self) -> None:
        """Show the record, once, to some of those that would send to this node."""
        if self._is_known or self._said != "serving":
            return
        self._is_known = True
        stage, now = self._describe().stage, self._transport.now()
        await show(self._rpc, audience(self._view, stage, now, self._rng))

    def _look_for_twin(self) -> None:
        seen = self._view.record_of(self._transport.peer_id)
        if seen is None or not self._twins.renewed(seen):
            return
        if self._twins.is_older(seen):
            raise leaves(seen)
        if not self._told_of_twin:
            self._told_of_twin = True
            self._events.warn(STAYS, "twin")

    def _clock_ahead(self) -> float:
        return self._transport.now() - asyncio.get_running_loop().time()

    def _notice_clock(self) -> None:
        """Notice that the machine slept, or its clock was set: its record has run out or lies in the future, and so
        do the others' as they were read. Nobody is taken for gone before the records have been read again.
        """
        ahead = self._clock_ahead()
        jump, self._ahead = ahead - self._ahead, ahead
        if abs(jump) < CLOCK_JUMP:
            return
        self._announced = float("-inf")
        self._view.clock_jumped(jump)
        self._events.say(
            f"This machine's clock jumped {abs(jump):.0f} s {'ahead' if jump > 0 else 'back'}; this node announces "
            "itself again. If the machine did not sleep, switch on time synchronisation (timedatectl set-ntp true).",
            "clock-jumped",
            seconds=round(jump, 1),
        )

    def _patience(self) -> float:
        """Seconds that the next look can wait at most: not long while nobody can take this node's microbatches."""
        if self._onward in self._stages and not self._view.knows_any(self._onward, self._transport.now()):
            return LONELY_SECONDS
        return float("inf")

    async def _keep_connected(self) -> None:
        """Save whom we know; when nobody is left, dial the peer book until somebody answers."""
        connected = await self._transport.peers()
        addresses = [address for _, known in connected for address in known]
        if connected and self._alone:
            self._events.say("Connected again.", "reconnected")
        if connected:
            self._alone = False
            if self._state is not None and not set(addresses) <= self._in_book:
                older = [a for a in self._state.peer_book() if a not in set(addresses)]
                self._state.save_peer_book(addresses + older)
                self._in_book |= set(addresses)
            return
        if not self._alone:
            self._alone = True
            self._events.warn(
                "No other peer is connected; this node keeps looking for those it knows.", "alone"
            )
        if self._state is not None:
            await self._transport.connect(self._state.addresses(), DIAL_DEADLINE)
            await self.announce()


class Renewal:
    """Renews one record in the DHT until told to stop; without it the record ends after its lifetime, in seconds."""

    def __init__(
        self, name: str, put: Callable[[], Awaitable[object]], lifetime: float, supervisor: Supervisor
    ) -> None:
        """`name` says what is renewed, for those who watch this node."""
        self._name = name
        self._put = put
        self._pause = lifetime / RENEWALS_PER_LIFETIME
        self._group = supervisor.group()
        self._runs = False

    @window
    def __repr__(self) -> str:
        return f"{self._name} | {'running' if self._runs else 'ended'} | Every: {self._pause:.1f} s"

    def begin(self) -> None:
        """Keep a record that was just put alive; may be repeated."""
        if not self._runs:
            self._runs = True
            self._group.keep(self._name, self._run, "Others may take it for gone.")

    async def end(self) -> None:
        """Stop renewing: the record stands for up to a lifetime more. May be repeated, and started again."""
        self._runs = False
        await self._group.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            try:
                await self._put()
            except NolocoError as problem:
                logger.debug("A record could not be renewed: %s", problem)
