"""Records of members from other members, beside the DHT.

Keys of the DHT lie with whoever is nearest to them, and ids can be tried until they are near: who sits there may keep
records to itself. So a newcomer also asks those whom it reached first, and then some whom these named, of networks as
different as can be; and a member whose record is overdue in the DHT is asked itself. Records are signed, so that
nobody has to be believed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Container, Iterable, Sequence

from pydantic import ValidationError

from node.membership.buckets import StageSize
from node.membership.membership import Membership
from node.membership.view import Member, View
from protocol.access.admission import Admission
from protocol.errors import NolocoError, RecordError
from protocol.ground import PeerId
from protocol.messages import Asks
from protocol.messages.peers import MOST_SHARED, GetRecord, GetRecords, Records, SharedRecord
from protocol.records.addresses import network_of
from protocol.records.announcement import open_announcement
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import all_of
from protocol.transport.base import Transport

logger = logging.getLogger(__name__)

ASK_DEADLINE = 3.0
ASKED = 4  # members at a time
SHOWN_TO = 16  # of those that send to a stage, by whoever begins to serve it
# of a lifetime: one that is renewed as it should be has two thirds of it left when it was just read
OVERDUE = 0.6
MOST_BYTES = 40 * 1024  # of the records in one answer


class RecordReader:
    """Opens records that peers show of themselves and of others: only current ones of this run get through."""

    def __init__(self, transport: Transport, run_id: str, admission: Admission | None) -> None:
        self._transport = transport
        self._run_id = run_id
        self._admission = admission

    def members(self, shown: Iterable[SharedRecord], stages: Container[int], view: View) -> list[Member]:
        """Open the records of these stages that end later than those the view has."""
        found = []
        for shared in shown:
            known = view.record_of(PeerId(shared.peer))
            if shared.stage not in stages or (known is not None and known.expires >= shared.expires):
                continue
            try:
                found.append(self._opened(shared))
            except RecordError as error:
                logger.debug("Ignoring a record that was shown: %s", error)
        return found

    def _opened(self, shared: SharedRecord) -> Member:
        """Open a record that was shown. Raises `RecordError` for what is not a current record of the run."""
        peer = PeerId(shared.peer)
        shown = shared.stage, shared.level, peer, shared.record, shared.expires
        record, announcement = open_announcement(self._run_id, *shown, self._transport.now())
        if self._admission is not None:
            self._admission.check(peer, record.credential, takes_part=True)
        if announcement.level != shared.level:
            raise RecordError("the record says another level")
        self._transport.learn(peer, announcement.addresses)
        self._transport.learn_ways(peer, [PeerId(between) for between in announcement.through])
        return Member(peer, announcement, record.expires, sealed=record.sealed)


def serve_records(rpc: Rpc, signed: SignedManifest, view: View, admission: Admission | None) -> None:
    """Answer whoever asks for records of the view, from now on, and note their own."""
    rng = random.Random(f"{rpc.transport.peer_id}/records")
    reader, stages = RecordReader(rpc.transport, signed.run_id, admission), range(signed.manifest.stages)

    async def on_get_records(request: Request[GetRecords]) -> Answer[Records]:
        own = [shared for shared in request.message.own if shared.peer == request.peer]
        view.take(reader.members(own, stages, view))
        asked = [stage for stage in dict.fromkeys(request.message.stages) if stage in stages]
        return Answer(Records(records=list(_some_of(rpc, view, asked, rng))))

    async def on_get_record(request: Request[GetRecord]) -> Answer[Records]:
        known = view.record_of(PeerId(request.message.peer))
        return Answer(Records(records=[] if known is None or not known.sealed else [_shared(known)]))

    rpc.handle(GetRecords.answered_by(on_get_records), GetRecord.answered_by(on_get_record))


async def hear_of(membership: Membership, peers: Sequence[PeerId], stages: Sequence[int]) -> None:
    """Ask the peers for records of these stages and bring what is good into the view.

    Takes `ASK_DEADLINE`; who does not answer by then, or answers nonsense, is passed over.
    """
    question = GetRecords(stages=list(stages), own=_own(membership.rpc))
    for found in await all_of(*(_ask(membership, peer, question, stages) for peer in peers)):
        membership.view.take(found)


def audience(view: View, stage: int, now: float, rng: random.Random) -> list[PeerId]:
    """Draw the members of the stage before to which one that begins to serve `stage` shows its record.

    Nobody, where all read the records at each turn. In a large stage it takes a minute until many have read it.
    """
    if not stage or view.sizes.setdefault(stage, StageSize()).every == 1:
        return []
    senders = view.serving(stage - 1, now)
    return rng.sample(senders, min(SHOWN_TO, len(senders)))


async def show(rpc: Rpc, peers: Sequence[PeerId]) -> None:
    """Show the own record to these peers. Takes `ASK_DEADLINE`; who does not answer by then is passed over."""
    shown = rpc.introduction
    if shown is None:
        return

    async def to(peer: PeerId) -> None:
        try:
            await rpc.call(peer, shown, deadline=ASK_DEADLINE)
        except NolocoError as problem:
            logger.debug("The record was not shown to %s: %s", peer[-8:], problem)

    await all_of(*map(to, peers))


async def hear_about(
    membership: Membership, stage: int, asked: PeerId, named: PeerId, deadline: float = ASK_DEADLINE
) -> None:
    """Ask the peer for the record of another member of this stage, which it has named, and take it into the view.

    Takes `deadline` seconds; without an answer, or with nonsense, the member stays unknown.
    """
    try:
        question = GetRecord(peer=named)
    except ValidationError:  # the name is no peer id
        return
    membership.view.take(await _ask(membership, asked, question, [stage], deadline))


async def hear_from_several(membership: Membership) -> None:
    """Ask, as a newcomer, some of the peers that were reached, then some of those that these have named.

    Takes twice `ASK_DEADLINE`.
    """
    stages, view, transport = range(membership.signed.manifest.stages), membership.view, membership.transport
    # its own, so that asking does not change what the node draws elsewhere
    rng = random.Random(f"{membership.run_id}/{transport.peer_id}/several")
    reached = {peer: network_of(addresses) for peer, addresses in await transport.peers()}
    first = spread_out(reached, rng)
    await hear_of(membership, first, stages)
    now = transport.now()
    named = {m.peer: m.network for stage in stages for m in view.members(stage, now)}
    second = spread_out({p: n for p, n in named.items() if p not in first and p != transport.peer_id}, rng)
    await hear_of(membership, second, stages)


def spread_out(networks: dict[PeerId, str], rng: random.Random) -> list[PeerId]:
    """Draw up to `ASKED` of these peers, of as many networks as there are."""
    groups: dict[str, list[PeerId]] = {}
    for peer in sorted(networks):
        groups.setdefault(networks[peer], []).append(peer)
    for group in groups.values():
        rng.shuffle(group)
    order = sorted(groups)
    rng.shuffle(order)
    deepest = max(map(len, groups.values()), default=0)
    drawn = (groups[name][depth] for depth in range(deepest) for name in order if depth < len(groups[name]))
    return [peer for peer, _ in zip(drawn, range(ASKED), strict=False)]


def overdue(members: Iterable[Member], now: float, lifetime: float) -> list[PeerId]:
    """The members that should have renewed their records and were not seen to, just now: they are gone, or hidden."""
    least = OVERDUE * lifetime
    return [m.peer for m in members if not m.announcement.level and m.expires + m.kept - now < least]


def _own(rpc: Rpc) -> list[SharedRecord]:
    own, me = rpc.introduction, rpc.transport.peer_id
    if own is None or not own.record or own.expires <= rpc.transport.now():
        return []
    return [SharedRecord(me, own.stage, own.level, own.record, own.expires)]


def _some_of(rpc: Rpc, view: View, stages: Sequence[int], rng: random.Random) -> Iterable[SharedRecord]:
    """Yield the own record, then of each stage as many as there is room for."""
    me, now, own = rpc.transport.peer_id, rpc.transport.now(), _own(rpc)
    yield from own
    room, places = MOST_BYTES - sum(len(shared.record) for shared in own), MOST_SHARED - len(own)
    for stage in stages:
        known = {m.peer: m for m in view.members(stage, now) if m.sealed and m.peer != me}
        shown = view.thinned(list(known), rng)
        for peer in rng.sample(shown, min(max(1, MOST_SHARED // len(stages)), len(shown))):
            member = known[peer]
            room, places = room - len(member.sealed), places - 1
            if room < 0 or places < 0:
                return
            yield _shared(member)


def _shared(member: Member) -> SharedRecord:
    said = member.announcement
    return SharedRecord(member.peer, said.stage, said.level, member.sealed, member.expires)


async def _ask(
    membership: Membership,
    peer: PeerId,
    question: Asks[Records],
    stages: Container[int],
    deadline: float = ASK_DEADLINE,
) -> list[Member]:
    rpc = membership.rpc
    reader = RecordReader(rpc.transport, membership.run_id, membership.admission)
    try:
        answer, _ = await rpc.call(peer, question, deadline=deadline)
    except NolocoError as problem:
        logger.debug("No records from %s: %s", peer[-8:], problem)
        return []
    return reader.members(answer.records, stages, membership.view)
