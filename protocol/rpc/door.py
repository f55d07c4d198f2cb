"""The door: who is answered here, how often, and how a member that the DHT has not shown yet introduces itself.

A member is who has signed a record of this run, and of a private one whoever its owner has invited. Training is for
members of the right stage. Visitors, who export, evaluate or only look, share what leaves training alone: an
`Allowance` of requests, few and small ones at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol.access.admission import Admission
from protocol.access.peer_limits import WITHOUT_END, Allowance, Bounded, PeerTable
from protocol.errors import PeerUnreachable, RecordError, Refused
from protocol.ground import PeerId, Record
from protocol.messages import Answer, Asker, Done, Request, Traffic
from protocol.messages.peers import Introduce
from protocol.messages.state import GetCopyPiece, GetStatePiece, GetTokenizer
from protocol.records.announcement import Announcement, open_announcement
from protocol.rpc.visitor_places import VisitorPlaces
from protocol.transport.base import Stream
from protocol.windows import counted, window

STRANGER = "stranger"  # the refusal; whoever has a record introduces itself then
VISITOR_BYTES = 64 * 1024  # of a request, beside the tokens of a microbatch
VISITOR_PLACES = 16  # requests of all visitors together answered at once, in each class of traffic
VISITOR_STREAMS = 128  # of all visitors together; a new one ends the oldest
MOST_INTRODUCED = 1_024
LONGEST_TURN = 10.0  # seconds that a request waits to be allowed
TURN_PAUSE = 0.25
# Requests at once and a second, of each and of all together. A small one takes a third of a millisecond: all visitors
# get a thirtieth of a core. `noloco generate` asks once for each token, a download once for each 16 MB.
VISITORS = (200, 50), (400, 100)
# Of a member for each kind of request: of what visitors may ask, too, and of what is for members alone
MEMBERS = (200, 100), (800, 400)
OWN = (1_000, 500), WITHOUT_END
# What visitors are not given any more once their share of the line is used up, or overdrawn by as much again: whoever
# joins fetches the tokenizer before it has a record
DOWNLOADS = {GetStatePiece.kind: 0.0, GetCopyPiece.kind: 0.0, GetTokenizer.kind: 1.0}
VISITOR_DOWNLOADS = 4e9, 4e6  # bytes to all visitors at once, and a second, without a volunteer's limit


@dataclass(frozen=True)
class _Introduced:
    stage: int
    expires: float  # wall clock


class Door:
    """Decides whose requests are answered: members by their records, visitors within a shared allowance.

    Mutable state: who introduced itself, what members and visitors may still ask, and visitors' streams.
    """

    def __init__(
        self,
        run_id: str,
        stages: Mapping[Asker, int],
        seen: Callable[[PeerId], int | None],
        now: Callable[[], float],
        visitor_bytes: int = VISITOR_BYTES,
        admission: Admission | None = None,
        noted: Callable[[Record, Announcement], None] = lambda record, announcement: None,
        network_of: Callable[[PeerId], str] = lambda peer: "",
        downloads: Allowance | None = None,
    ) -> None:
        """`stages` are those of `REPLICA` and `BEFORE`, `seen` is the stage by a peer's record in the DHT, if there
        is one, `now` the wall clock; no request of a visitor has more than `visitor_bytes`. Without `admission` the
        run is open. `noted` is called with the record of each member that introduces itself; `network_of` is the
        network of a peer's connection, where it is known, and `downloads` what visitors may take of this line.
        """
        self._noted = noted
        self._admission = admission
        self._run_id = run_id
        self._stages = stages
        self._seen = seen
        self._now = now
        self._visitor_bytes = visitor_bytes
        self._introduced = PeerTable[_Introduced](MOST_INTRODUCED)
        self._visitors = Allowance(*VISITORS)
        self._members: dict[str, Allowance] = {}  # by kind of request; unknown kinds share one
        self._downloads = downloads or Allowance.shared(*VISITOR_DOWNLOADS)
        self._streams = Bounded[Stream, None](
            VISITOR_STREAMS, lambda stream, _: stream.close()
        )  # of visitors
        self._places = {traffic: VisitorPlaces(VISITOR_PLACES, network_of) for traffic in Traffic}

    @window
    def __repr__(self) -> str:
        run = "open" if self._admission is None else repr(self._admission)
        stages = ", ".join(f"{stage} for {asker}" for asker, stage in self._stages.items())
        visitors = counted(len(self._streams), "stream")
        return f"Run: {run} | Stages: {stages} | Introduced: {len(self._introduced)} | Visitors: {visitors}"

    def knows(self, peer: PeerId) -> bool:
        """Return whether a peer is a member, of any stage."""
        has_record = self._seen(peer) is not None or self._introduced_at(peer) is not None
        return has_record and self._lets_in(peer)

    def _lets_in(self, peer: PeerId) -> bool:
        return self._admission is None or self._admission.knows(peer)

    # --- streams

    def places(self, peer: PeerId, traffic: Traffic) -> VisitorPlaces | None:
        """The places that a visitor's requests share with all others'; None for a member."""
        return None if self.knows(peer) else self._places[traffic]

    def enter(self, stream: Stream) -> None:
        """Note that a stream has come, perhaps a visitor's."""
        if self.knows(stream.remote):
            return
        self._streams[stream] = None

    def leave(self, stream: Stream) -> None:
        self._streams.pop(stream, None)

    def note_gone(self, peer: PeerId) -> None:
        """Note that the last stream of a peer has ended."""
        if self._admission is not None:
            self._admission.note_gone(peer)

    def has_ended(self, stream: Stream) -> bool:
        """Return whether a stream was a visitor's that had to give way to another one."""
        return stream not in self._streams and not self.knows(stream.remote)

    def bound(self, peer: PeerId, most: int, nbytes: int) -> int:
        """The most bytes that a request may have, of which `nbytes` are about to come: `most` from a member.

        Raises `PeerUnreachable`, so that the stream ends, when a visitor sends what only members may: it may be one
        that this node has forgotten, which then introduces itself.
        """
        if self._visitor_bytes < nbytes <= most and not self.knows(peer):
            raise PeerUnreachable(f"{nbytes} bytes from a stranger")
        return most

    # --- requests

    async def admit(self, peer: PeerId, asker: Asker, kind: str = "") -> None:
        """Return when a request for such an `asker` may be answered; `kind` is empty for one that nobody answers.

        Each waits for its turn, and so does a refusal: it costs, too. Raises `Refused` "stranger", "too-often" after
        `LONGEST_TURN`, or "too-much" when visitors have had what the volunteer lets them take.
        """
        if asker is Asker.NEWCOMER or (asker is Asker.ANYBODY and self._lets_in(peer)):
            await self._turn(peer, kind, MEMBERS)
            if kind in DOWNLOADS and not self.knows(peer):
                self._require_rest(peer, kind)
        elif asker is not Asker.ANYBODY and self._is(peer, asker):
            await self._turn(peer, kind, OWN)
        else:
            await self._turn(peer, kind, MEMBERS)
            raise Refused(STRANGER, f"this is for {_MEANT[asker]}; introduce yourself")

    def _require_rest(self, peer: PeerId, kind: str) -> None:
        if not self._downloads.has_any(peer, self._clock(), DOWNLOADS[kind]):
            raise Refused(
                "too-much", "visitors have had their share of this node's line; ask another, or later"
            )

    def note_answer(self, peer: PeerId, nbytes: int) -> None:
        """Note the size of an answer: a visitor's counts toward what visitors may take."""
        if not self.knows(peer):
            self._downloads.spend(peer, nbytes, self._clock())

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def on_introduce(self, request: Request[Introduce]) -> Answer[Done]:
        """Take note of a member's own record, or of what a visitor shows. Raises `Refused` "no-record"."""
        message, peer = request.message, request.peer
        try:
            if message.credential and not message.record and self._admission is not None:
                self._admission.check(peer, message.credential)
            else:
                self._introduced[peer] = self._opened(message, peer)
        except RecordError as error:
            raise Refused("no-record", str(error)) from error
        for stream in [stream for stream in self._streams if stream.remote == peer and self.knows(peer)]:
            self.leave(stream)
        return Answer(Done())

    def _opened(self, message: Introduce, peer: PeerId) -> _Introduced:
        shown = message.stage, message.level, peer, message.record, message.expires
        record, announcement = open_announcement(self._run_id, *shown, self._now())
        if self._admission is not None:
            self._admission.check(peer, record.credential, takes_part=True)
        self._noted(record, announcement)
        return _Introduced(announcement.stage, message.expires)

    def _is(self, peer: PeerId, asker: Asker) -> bool:
        if asker is Asker.MEMBER:
            return self.knows(peer)
        stage = self._stages.get(asker)
        return (
            self._lets_in(peer)
            and stage is not None
            and stage in (self._seen(peer), self._introduced_at(peer))
        )

    def _introduced_at(self, peer: PeerId) -> int | None:
        known = self._introduced.get(peer)
        return known.stage if known is not None and known.expires > self._now() else None

    async def _turn(
        self, peer: PeerId, kind: str, limits: tuple[tuple[float, float], tuple[float, float]]
    ) -> None:
        allowance = self._visitors
        if self.knows(peer):
            allowance = self._members.setdefault(kind, Allowance(*limits))
        clock = self._clock
        last = clock() + LONGEST_TURN
        while not allowance.take(peer, 1, clock()):
            if clock() >= last:
                raise Refused("too-often", "too much is asked of this node")
            await asyncio.sleep(TURN_PAUSE)


_MEANT = {
    Asker.ANYBODY: "those whom the run's owner has invited",
    Asker.MEMBER: "members of the run",
    Asker.REPLICA: "replicas of this stage",
    Asker.BEFORE: "the stage before this one",
}
