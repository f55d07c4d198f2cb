"""Copies of stages on disk, for newcomers to a stage that nobody serves: donors of last resort.

Every node offers the checkpoints of the stages that it has served. The seed peer, and nodes with `--keep`, also fetch
a copy of each stage now and then (`copy_keeper`). A copy is as of some minutes ago: better than the run's seed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from node.membership.membership import Membership
from node.membership.others_past import ASKED, asked_peers
from node.membership.past import Remembered
from node.model.fragment import PIECE_PARAMETERS
from node.model.replica import digest_of
from node.state.download import State, WantedState
from node.state.transfer import PIECE_DEADLINE, piece_count, require_undamaged, within_piece
from node.state.witnesses import are_possible
from node.storage.checkpoint_files import KeptCheckpoint, piece_of
from node.storage.state_directory import StateDirectory
from protocol.codecs.codec import encode
from protocol.errors import CodecError, JoinError, NolocoError, Refused, StateError
from protocol.ground import PeerId
from protocol.messages.peers import MOST_STAGES_ASKED
from protocol.messages.state import Copies, GetCopies, GetCopyPiece, StageCopy, StatePiece
from protocol.records.lineage import Lineage
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

ASK_DEADLINE = 5.0
TRIES = 2  # of each peer, for a piece
PIECES_IN_FLIGHT = 2  # read from the disk for others at once
RECENT_SECONDS = (
    900.0  # a copy that is no older than this, when its stage was last seen, is not waited beyond
)
NEAR_ROUNDS = 4  # nor is one that is so near, in rounds


class CopyService:
    """Offers the states on this peer's disk to any peer that asks.

    Mutable state: none but the directories; each question looks at what is there.
    """

    def __init__(self, rpc: Rpc, run_id: str, directories: Sequence[StateDirectory]) -> None:
        self._rpc = rpc
        self._run_id = run_id
        self._directories = directories
        self._reading = asyncio.Semaphore(PIECES_IN_FLIGHT)

    def __repr__(self) -> str:
        return (
            f"<CopyService, directories: {', '.join(str(one.path) for one in self._directories) or 'none'}>"
        )

    def serve(self) -> None:
        """Answer, also after a service has ended that answered for a stage."""
        self._rpc.handle(
            GetCopies.answered_by(self.on_copies),
            GetCopyPiece.answered_by(self.on_piece),
        )

    def kept(self) -> list[KeptCheckpoint]:
        """Return all copies that can be offered. Call it in another thread: it reads the disk for milliseconds."""
        return [kept for one in self._directories for kept in one.kept_with_older(self._run_id)]

    async def on_copies(self, request: Request[GetCopies]) -> Answer[Copies]:
        stages, kept = request.message.stages, await asyncio.to_thread(self.kept)
        copies = [
            StageCopy(
                one.stage,
                one.step,
                one.round,
                one.parameters,
                one.lineage.beginning,
                one.lineage.begun,
                one.saved,
            )
            for one in kept
            if one.stage in stages
        ]
        return Answer(Copies(copies=copies[:MOST_STAGES_ASKED]))

    async def on_piece(self, request: Request[GetCopyPiece]) -> Answer[StatePiece]:
        asked = request.message
        async with self._reading:
            return await asyncio.to_thread(self._piece, asked)

    def _piece(self, asked: GetCopyPiece) -> Answer[StatePiece]:
        for kept in self.kept():
            if (kept.stage, kept.lineage.beginning, kept.step) == (asked.stage, asked.beginning, asked.step):
                break
        else:
            raise Refused("no-copy", f"there is no copy of stage {asked.stage} at step {asked.step} here")
        start = asked.index * PIECE_PARAMETERS
        if start >= kept.parameters:
            raise Refused("no-such-piece")
        try:
            tensors = piece_of(kept, slice(start, min(start + PIECE_PARAMETERS, kept.parameters)))
        except StateError as damage:
            raise Refused("no-copy", str(damage)[:200]) from None
        reply = StatePiece(index=asked.index, step=kept.step, round=kept.round, digest=digest_of(tensors))
        return Answer(reply, [encode(tensor, "fp32") for tensor in tensors])


@dataclass(frozen=True)
class OfferedCopy:
    """A copy that some peers offer, all of the same step."""

    copy: StageCopy
    peers: tuple[PeerId, ...]

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.copy.beginning, self.copy.begun)


def is_recent(step: int, saved: float, past: Remembered, inner_steps: int) -> bool:
    """Return whether a state is so near to where its stage was last seen that nobody needs to be waited for."""
    return past.step - step <= NEAR_ROUNDS * inner_steps or past.seen - saved <= RECENT_SECONDS


def chosen(
    offers: Mapping[PeerId, Sequence[StageCopy]], past: Sequence[Remembered], lifetime: float
) -> OfferedCopy | None:
    """Return the copy to take: the furthest of the oldest lineage; None if the stage's past bears none out.

    A copy is of a lineage that members are known to have had, and no further than they can be by now: anybody can
    offer one. Those who offer the same have one of the same round and beginning; of several the one of most peers.
    """
    found: dict[tuple[tuple[int, float, int], int, float], dict[PeerId, StageCopy]] = {}
    for peer, copies in offers.items():
        for copy in copies:
            lineage = Lineage(copy.beginning, copy.begun)
            of_it = [one for one in past if one.lineage.is_same(lineage, lifetime)]
            if of_it and 0 < copy.step <= max(one.step for one in of_it) + _further(of_it):
                # those of one lineage were seen first at one time, whatever else has the same number
                place = copy.beginning, min(one.record.first for one in of_it), -copy.step
                found.setdefault((place, copy.round, copy.begun), {})[peer] = copy
    if not found:
        return None
    best = found[min(found, key=lambda one: (one[0], -len(found[one]), one))]
    return OfferedCopy(next(iter(best.values())), tuple(sorted(best)))


def _further(past: Sequence[Remembered]) -> int:
    """Return how many steps a member may have done since its last record that was read."""
    return max(100, max(one.step for one in past) // 4)


class StageCopies:
    """Finds the copies that others have of one stage. Mutable state: peers that offered one and did not give it."""

    def __init__(self, membership: Membership, wanted: WantedState) -> None:
        self._membership = membership
        self._wanted = wanted
        self._in_vain: set[PeerId] = set()

    def __repr__(self) -> str:
        return f"<StageCopies of stage {self._wanted.stage}>"

    async def offered(self, beyond: int) -> OfferedCopy | None:
        """Ask as `offers` does; return the copy to take, None where there is none beyond step `beyond`."""
        return self.chosen(await self.offers(beyond))

    def chosen(self, offers: Mapping[PeerId, Sequence[StageCopy]]) -> OfferedCopy | None:
        """Return the copy to take of these, as `chosen` does, without peers whose copy could not be fetched."""
        possible = {
            peer: [copy for copy in copies if self._wanted.limits.allow(copy.step, copy.round)]
            for peer, copies in offers.items()
            if peer not in self._in_vain
        }
        return chosen(possible, self._membership.past.of(self._wanted.stage), self._membership.lifetime)

    async def offers(self, beyond: int) -> dict[PeerId, list[StageCopy]]:
        """Ask the peers that had the stage last, the seed peer and others for copies beyond step `beyond`.

        Takes `ASK_DEADLINE`; a peer that does not answer by then has no copy.
        """
        membership, wanted, offers = self._membership, self._wanted, dict[PeerId, list[StageCopy]]()

        async def ask(peer: PeerId) -> None:
            try:
                answer, _ = await membership.rpc.call(
                    peer, GetCopies(stages=[wanted.stage]), deadline=ASK_DEADLINE
                )
            except NolocoError as problem:
                logger.debug("No copies from %s: %s", peer[-8:], problem)
                return
            offers[peer] = [
                copy
                for copy in answer.copies
                if copy.stage == wanted.stage and copy.parameters == wanted.parameters and copy.step > beyond
            ]

        past = self._membership.past.of(wanted.stage)
        for one in past[:ASKED]:  # it may rest, with the stage on its disk
            membership.transport.learn(one.peer, list(one.addresses))
        asked = [one.peer for one in past[:ASKED]] + await asked_peers(membership, 2 * ASKED)
        await all_of(*(ask(peer) for peer in dict.fromkeys(asked) if peer != membership.transport.peer_id))
        return offers

    async def fetch(self, offer: OfferedCopy, tell: Callable[[float], None]) -> State:
        """Fetch the copy, see `fetch_copy`. A peer that offers one and does not give it is not asked again."""
        try:
            return await fetch_copy(self._membership.rpc, offer, self._wanted, tell)
        except JoinError:
            self._in_vain.update(offer.peers)
            raise


async def fetch_copy(
    rpc: Rpc, offer: OfferedCopy, wanted: WantedState, tell: Callable[[float], None] = lambda fraction: None
) -> State:
    """Fetch a copy of a stage that nobody serves from those that have it, piece by piece.

    Deadline: `PIECE_DEADLINE` a piece. Each must be finite, whole, and such as the optimizer makes. Raises
    `JoinError` when nobody gives one of them; nothing is changed by then and it may be repeated.
    """
    pieces, count = State(), piece_count(wanted.parameters)
    for number in range(count):
        pieces[number] = await fetch_copy_piece(rpc, offer, wanted, number)
        tell((number + 1) / count)
    return pieces


async def fetch_copy_piece(
    rpc: Rpc, offer: OfferedCopy, wanted: WantedState, number: int
) -> list[torch.Tensor]:
    """Fetch one piece, φ, δ and AdamW's moments, of a copy; see `fetch_copy`."""
    copy, reason = offer.copy, "nobody has it"
    asked = GetCopyPiece(stage=copy.stage, beginning=copy.beginning, step=copy.step, index=number)
    size = min(PIECE_PARAMETERS, wanted.parameters - number * PIECE_PARAMETERS)

    def read(piece: StatePiece, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        require_undamaged(piece, tensors, number, size)
        if (piece.step, piece.round) != (copy.step, copy.round):
            raise CodecError("a piece of a copy is that of another one")
        _, _, first, second = tensors
        if not are_possible(first, second, wanted.inner, within_piece(wanted.muons, number)):
            raise CodecError("no optimizer makes such moments")
        return tensors

    for place in range(TRIES * len(offer.peers)):
        peer = offer.peers[(number + place) % len(offer.peers)]
        try:
            return await rpc.call_and_read(peer, asked, deadline=PIECE_DEADLINE, read=read)
        except NolocoError as failure:
            reason = f"…{peer[-8:]}: {failure}"
            logger.debug("Piece %d of a copy: %s", number, reason)
    raise JoinError(f"The copy of stage {copy.stage} could not be fetched ({reason}).")
