"""The past of a run's stages: who served each at which step, from signed records that are over by now.

A record says when it ends, and only its signer could have written it. What it cannot prove is that it is old: anybody
may sign one today that has ended yesterday. So a node believes what it has read itself while it was current, and of
what others remember only what somebody else than its signer tells (docs/moving.md says what a liar can do with that).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgpack

from node.membership.view import Member
from protocol.access.admission import Admission
from protocol.access.peer_limits import PeerTable
from protocol.errors import RecordError
from protocol.ground import PeerId
from protocol.messages.peers import MOST_SHARED, GetPast, PastRecord, PastRecords
from protocol.records.announcement import Announcement, record_key
from protocol.records.lineage import MOST_BEGINNINGS, Lineage
from protocol.records.records import authenticate, is_in_reach, key_digest
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.windows import window

logger = logging.getLogger(__name__)

DAYS = 7.0  # for which the past is remembered, as long as checkpoints are kept
MOST_OF_STAGE = 16  # members and lineages; those that were there for the shortest time go first
MOST_STAGES = 256
MOST_BYTES = 8 * 1024 * 1024  # of a file of it
BYTES_IN_FRAME = 40 * 1024  # of them in one answer
MOST_WITNESSES = 64  # of a stage; those that were heard first go first


@dataclass(frozen=True)
class Remembered:
    """The last record that was read of one member of one lineage of a stage."""

    record: PastRecord
    step: int
    round: int
    lineage: Lineage
    addresses: tuple[str, ...] = ()

    @property
    def peer(self) -> PeerId:
        return PeerId(self.record.peer)

    @property
    def seen(self) -> float:
        """The wall clock until which its record was to live."""
        return self.record.expires


class Past:
    """Remembers who served which stage, at which step and of which lineage.

    Mutable state: what this node has read, by stage, member and lineage; and what others have told it that they read.
    """

    def __init__(
        self, run_id: str, most_steps: Callable[[int], int], lifetime: float, now: Callable[[], float]
    ) -> None:
        """`most_steps` are a stage's, `lifetime` is that of records and `now` the wall clock, both in seconds."""
        self._run_id = run_id
        self._most_steps = most_steps
        self._lifetime = lifetime
        self._now = now
        self._read: dict[int, dict[tuple[PeerId, Lineage], Remembered]] = defaultdict(dict)
        # by stage and witness
        self._told = defaultdict[int, PeerTable[list[Remembered]]](lambda: PeerTable(MOST_WITNESSES))
        self.has_changed = False  # since `to_bytes`

    @window
    def __repr__(self) -> str:
        read = ", ".join(f"{len(found)} of stage {stage}" for stage, found in sorted(self._read.items()))
        return (
            f"Run: {self._run_id} | Read: {read or 'nothing'} | Told by: {sum(map(len, self._told.values()))}"
        )

    # --- what this node reads -----------------------------------------------------------------

    def note(self, member: Member) -> None:
        """Remember a current record of a member that has its stage's state."""
        said = member.announcement
        if said.state == "joining" or not member.sealed or not self._is_possible(said):
            return
        if said.stage not in self._read and len(self._read) >= MOST_STAGES:
            return
        of_stage = self._read[said.stage]
        key = member.peer, said.lineage
        first = of_stage[key].record.first if key in of_stage else self._now()
        record = PastRecord(member.peer, said.stage, said.level, member.sealed, member.expires, first)
        of_stage[key] = Remembered(record, said.step, said.round, said.lineage, tuple(said.addresses))
        self.has_changed = True
        if len(of_stage) > MOST_OF_STAGE:
            del of_stage[min(of_stage, key=lambda key: self._span(of_stage[key]))]

    def _span(self, one: Remembered) -> float:
        """Return the seconds for which a member was seen: a record may live for longer than the run's do."""
        return min(one.seen, self._now() + self._lifetime) - one.record.first

    def _is_possible(self, said: Announcement) -> bool:
        return 0 < said.step <= self._most_steps(said.stage) and said.beginning <= MOST_BEGINNINGS

    # --- what others have read ----------------------------------------------------------------

    def hear(self, witness: PeerId, told: Iterable[PastRecord], admission: Admission | None) -> None:
        """Take in what a peer remembers of others; what it did not read, or cannot have read, is passed over."""
        found: dict[int, list[Remembered]] = defaultdict(list)
        for record in told:
            if record.peer == witness:
                continue
            try:
                found[record.stage].append(self._opened(record, admission))
            except RecordError as problem:
                logger.debug("Ignoring a record of the past: %s", problem)
        for stage, remembered in found.items():
            if stage in self._told or len(self._told) < MOST_STAGES:
                self._told[stage][witness] = remembered[:MOST_OF_STAGE]

    def _opened(self, record: PastRecord, admission: Admission | None) -> Remembered:
        """Check a record that may be over. Raises `RecordError`."""
        now = self._now()
        is_finite = math.isfinite(record.expires)
        if not (is_finite and now - DAYS * 86_400 <= record.expires and is_in_reach(record.expires, now)):
            raise RecordError("it is not of the last days")
        place = key_digest(record_key(self._run_id, record.stage, record.peer, record.level))
        opened = authenticate(place, record.peer, record.record, record.expires)
        said = Announcement.read(opened)
        if said.stage != record.stage or said.state == "joining" or not self._is_possible(said):
            raise RecordError("it does not say that its member had the stage")
        if admission is not None:
            admission.check(opened.subkey, opened.credential, takes_part=True)
        first = record.first if math.isfinite(record.first) else now
        addresses = tuple(said.addresses)
        return Remembered(record._replace(first=first), said.step, said.round, said.lineage, addresses)

    # --- what follows from it -----------------------------------------------------------------

    def of(self, stage: int, without: PeerId | None = None) -> list[Remembered]:
        """All that is believed of a stage, the latest first; nothing of the member `without`, as of this node."""
        since = self._now() - DAYS * 86_400
        told = [one for heard in self._told.get(stage, {}).values() for one in heard]
        known = [*self._read.get(stage, {}).values(), *told]
        return sorted(
            (one for one in known if one.peer != without and one.seen >= since),
            key=lambda one: (one.seen, one.step),
            reverse=True,
        )

    def proves(self, stage: int, peer: PeerId, lineage: Lineage, before: float) -> bool:
        """Return whether the peer had a state of this lineage before the wall clock time `before`.

        This node has read so itself, or more than half of those that remember something of the stage have.
        """

        def is_it(one: Remembered) -> bool:
            is_of_it = one.peer == peer and one.lineage.is_same(lineage, self._lifetime)
            return is_of_it and one.record.first < before

        if any(is_it(one) for one in self._read.get(stage, {}).values()):
            return True
        votes = [
            any(map(is_it, heard)) for witness, heard in self._told.get(stage, {}).items() if witness != peer
        ]
        return 2 * sum(votes) > len(votes)

    # --- kept and shown -----------------------------------------------------------------------

    def shown(self, stages: Sequence[int]) -> list[PastRecord]:
        """What this node has read of these stages itself, the latest of each first."""
        most = max(1, MOST_SHARED // max(1, len(stages)))
        since = self._now() - DAYS * 86_400
        found: list[PastRecord] = []
        for stage in dict.fromkeys(stages):
            of_stage = sorted(self._read.get(stage, {}).values(), key=lambda one: one.seen, reverse=True)
            found += [one.record for one in of_stage[:most] if one.seen >= since]
        return found[:MOST_SHARED]

    def to_bytes(self) -> bytes:
        """Return what this node has read, to be kept, in `MOST_BYTES`.

        Members that were seen for the shortest time are left out first.
        """
        self.has_changed = False
        remembered = [one for of_stage in self._read.values() for one in of_stage.values()]
        remembered.sort(key=self._span, reverse=True)
        records = _within([one.record for one in remembered], MOST_BYTES)
        packed: bytes = msgpack.packb([list(record) for record in records])
        return packed

    def take_up(self, kept: bytes) -> None:
        """Take up what was kept; whatever is damaged, forged or too old is passed over."""
        try:
            entries = msgpack.unpackb(kept) if len(kept) <= MOST_BYTES else []
        except (ValueError, msgpack.UnpackException):
            entries = []
        if not isinstance(entries, list):
            entries = []
        for entry in entries[: MOST_STAGES * MOST_OF_STAGE]:
            try:
                remembered = self._opened(PastRecord(*entry[: len(PastRecord._fields)]), None)
            except (RecordError, ValueError, TypeError, AttributeError, OverflowError):
                continue
            self._read[remembered.record.stage][remembered.peer, remembered.lineage] = remembered


def serve_past(rpc: Rpc, past: Past) -> None:
    """Tell whoever asks what this peer has read of the past."""

    async def on_get_past(request: Request[GetPast]) -> Answer[PastRecords]:
        return Answer(PastRecords(records=_within(past.shown(request.message.stages), BYTES_IN_FRAME)))

    rpc.handle(GetPast.answered_by(on_get_past))


def _within(records: Sequence[PastRecord], most: int) -> list[PastRecord]:
    """Return the first of the records that take `most` bytes together."""
    taken: list[PastRecord] = []
    for record in records:
        most -= len(record.record) + 128
        if most < 0:
            break
        taken.append(record)
    return taken
