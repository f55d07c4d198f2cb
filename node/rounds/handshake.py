"""The small calls by which pairs are made: deadlines of a few round trips, repeated when a stream breaks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict

from node.links.trip_times import TripTimes
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from protocol.errors import DeadlineExceeded, NolocoError, PeerUnreachable, Refused
from protocol.ground import PeerId
from protocol.messages import Asks
from protocol.messages.training import Propose, Ready, Release, SitOut, Timed
from protocol.rpc.rpc import Reply, Rpc


class Handshake:
    """Sends the calls by which two replicas agree on a round."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._times = TripTimes()

    @property
    def round_trip(self) -> float:
        return self._times.round_trip

    def deadline_of(self, peer: PeerId) -> float:
        """Seconds that the peer's next answer may take."""
        return self._times.deadline_of(peer)

    async def propose(
        self, proposal: Proposal, stage: int, round_: int, beginning: int = 0
    ) -> Meeting | Refusal:
        """Ask the other and return its answer. Raises `NolocoError` without one; it may have agreed all the same."""
        pair = proposal.pair
        message = Propose(
            stage=stage, round=round_, pair=pair.name, beginning=beginning, **asdict(proposal.mine)
        )
        try:
            return meeting_in(await self._call(pair.partner, message))
        except Refused as refusal:
            return Refusal.told(refusal.code, refusal.reason)

    async def ready(self, pair: Pair) -> bool:
        """Tell the partner that the round ends; False when it knows of no such pair.

        Losing this costs the partner a few more inner steps, nothing else.
        """
        try:
            await self._call(pair.partner, Ready(pair=pair.name))
        except Refused:
            return False
        except NolocoError:
            pass
        return True

    async def release(self, pair: Pair) -> None:
        """Give the pair up. Losing this costs the partner the time until it asks whether the pair still holds."""
        with contextlib.suppress(NolocoError):
            await self._call(pair.partner, Release(pair=pair.name))

    async def sit_out(self, peer: PeerId, stage: int, meeting: Meeting) -> None:
        """Ask the peer to sit out. When this is refused or lost, whoever comes last to the search is left over."""
        with contextlib.suppress(NolocoError):
            await self._call(peer, SitOut(stage=stage, **asdict(meeting)))

    async def _call(self, peer: PeerId, message: Asks[Reply]) -> Reply:
        """Ask something that may be repeated: a stream that breaks costs one more try, not a deadline.

        Raises as `Rpc.call`.
        """
        try:
            return await self._try(peer, message)
        except PeerUnreachable:
            return await self._try(peer, message)

    async def _try(self, peer: PeerId, message: Asks[Reply]) -> Reply:
        loop = asyncio.get_running_loop()
        began, deadline = loop.time(), self.deadline_of(peer)
        try:
            answer, _ = await self._rpc.call(peer, message, deadline=deadline)
        except DeadlineExceeded:
            self._times.missed(peer)
            raise
        except Refused:
            self._times.answered(peer, loop.time() - began)
            raise
        self._times.answered(peer, loop.time() - began)
        return answer


def meeting_in(message: Timed) -> Meeting:
    return Meeting(message.opens_in, message.due_in, message.ends_in, message.step_seconds)
