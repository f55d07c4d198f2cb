"""State of a stage from its replicas, in pieces: for late joiners, for export and for measuring the spread.

A piece holds the same range of φ, δ and AdamW's moments of one replica and is complete in itself. Replicas of
a stage are near each other, so pieces of several of them together are a valid start (`download`): a donor that dies
or moves on costs one piece, never the download, and no donor is locked.

A replica of a stage that trains and one that started again from the seed while it could not be seen hold unrelated
weights; pieces of both are no model. So the donors of one download come from one group, of replicas that are about
as far as each other: the largest one, and of two as large the one that is further. Replicas in their first rounds
give theirs only where others are as many. What one of them alone says moves nothing: the median of the group counts,
and a group that is further than half of all say they are is none. Whether the values belong together is looked at,
too: `witnesses`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_high, median_low

import torch

from node.model.compute import Compute, Priority
from node.model.fragment import PIECE_PARAMETERS
from node.model.replica import Replica, digest_of
from node.state.witnesses import sample_of
from protocol.codecs.codec import encode
from protocol.errors import CodecError, JoinError, NolocoError, Refused, later
from protocol.ground import PeerId
from protocol.messages.state import (
    GetStateIndex,
    GetStatePiece,
    GetStateSample,
    StateIndex,
    StatePiece,
    StateSample,
)
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.manifest import Manifest
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

PIECE_DEADLINE = 60.0
INDEX_DEADLINE = 10.0
PIECES_IN_FLIGHT = 4
TRIES_PER_PIECE = 6
FRESH_ROUNDS = 2  # a replica this young may have started again
NEAR_ROUNDS = 4  # between two of a group, or
NEAR_SHARE = 0.25  # of their rounds: replicas of other speeds are further apart the older they are
FASTEST_ROUND = 0.25  # seconds: a round's exchange takes longer on the links that downloads take
# Rounds beyond its inner steps: after the last of these a replica averages with others that still train, for ten
# minutes at most and after each restart
MOST_CLOSING = 10_000
LONGEST_ROUND = 5  # times k inner steps: the longest nominal round and its window


@dataclass(frozen=True)
class DonorProgress:
    """A replica's progress: its inner and outer steps."""

    step: int
    round: int

    @property
    def is_possible(self) -> bool:
        """Return whether there can be so many rounds: one takes an inner step, but for those after the last step."""
        return self.round <= self.step + MOST_CLOSING


@dataclass(frozen=True)
class RunLimits:
    """The manifest's limits for the progress of a stage's replicas."""

    most_steps: int  # inner steps
    inner_steps: int  # k

    @classmethod
    def of(cls, manifest: Manifest, stage: int) -> RunLimits:
        return cls(manifest.most_steps(stage), manifest.outer.inner_steps)

    def allow(self, step: int, round_: int) -> bool:
        """Return whether a replica can be so far."""
        return step <= self.most_steps and DonorProgress(step, round_).is_possible


def together(told: Mapping[PeerId, DonorProgress]) -> dict[PeerId, DonorProgress]:
    """The donors among those that told how far they are; empty when nobody told anything that can be.

    Groups that are further, as a whole, than half of all are none: anybody can say a number.
    """
    possible = {peer: progress for peer, progress in told.items() if progress.is_possible}
    established = {peer: progress for peer, progress in possible.items() if progress.round > FRESH_ROUNDS}
    usual = median_high(progress.round for progress in possible.values()) if possible else 0
    groups = [
        group
        for group in _groups(established if usual > FRESH_ROUNDS else possible)
        if min(progress.round for progress in group.values()) <= usual
    ]
    return max(
        groups, key=lambda group: (len(group), max(progress.round for progress in group.values())), default={}
    )


def _groups(told: Mapping[PeerId, DonorProgress]) -> list[dict[PeerId, DonorProgress]]:
    """Cut where one replica is too far from the next one."""
    ordered = sorted(told, key=lambda peer: (told[peer].round, peer))
    groups = [{peer: told[peer]} for peer in ordered[:1]]
    for before, peer in pairwise(ordered):
        near = max(NEAR_ROUNDS, NEAR_SHARE * told[peer].round)
        if told[peer].round - told[before].round > near:
            groups.append({})
        groups[-1][peer] = told[peer]
    return groups


def follows(now: DonorProgress, before: DonorProgress, seconds: float, limits: RunLimits) -> bool:
    """Return whether a replica that was as far as `before` can be as far as `now`, so many seconds later.

    What it gives of the round that it spoke of may be as it was earlier in that round, when it saved its state.
    """
    rounds = NEAR_ROUNDS + seconds / FASTEST_ROUND
    a_round = LONGEST_ROUND * limits.inner_steps
    earlier = a_round if now.round == before.round else 0
    is_near = 0 <= now.round - before.round <= rounds
    return is_near and -earlier <= now.step - before.step <= rounds * a_round


def adopted(donors: Sequence[DonorProgress], limits: RunLimits) -> DonorProgress:
    """The progress that a replica made of these donors' pieces may claim: their medians, within the run's length."""
    step = min(median_low(donor.step for donor in donors), limits.most_steps)
    return DonorProgress(step, min(median_low(donor.round for donor in donors), step + MOST_CLOSING))


class StateService:
    """Gives pieces of the own state to whoever asks."""

    def __init__(self, stage: int, replica: Replica, compute: Compute) -> None:
        self._stage = stage
        self._replica = replica
        self._compute = compute

    def serve(self, rpc: Rpc) -> None:
        rpc.handle(
            GetStateIndex.answered_by(self.on_index),
            GetStatePiece.answered_by(self.on_piece),
            GetStateSample.answered_by(self.on_sample),
        )

    async def on_index(self, request: Request[GetStateIndex]) -> Answer[StateIndex]:
        replica = self._replica
        return Answer(
            StateIndex(
                stage=self._stage,
                step=replica.step,
                round=replica.round,
                parameters=replica.parameters,
                piece_parameters=PIECE_PARAMETERS,
                beginning=replica.lineage.beginning,
            )
        )

    async def on_piece(self, request: Request[GetStatePiece]) -> Answer[StatePiece]:
        message = request.message
        held = await self._held(message.stage, message.index, message.moments)
        return await asyncio.to_thread(_piece_of, message.index, held)

    async def on_sample(self, request: Request[GetStateSample]) -> Answer[StateSample]:
        message = request.message
        held = await self._held(message.stage, message.index, moments=True)
        return await asyncio.to_thread(_sample_of, message.positions, held)

    async def _held(self, stage: int, index: int, moments: bool) -> _Held:
        """Take it from the last snapshot while φ is as it was then, sparing the compute thread. Raises `Refused`."""
        if stage != self._stage:
            raise Refused("other-stage", f"this node serves stage {self._stage}")
        saved = await asyncio.to_thread(self._replica.read_saved_piece, index)
        if saved is None:
            return await self._compute.run(Priority.SERVE, self._live, index, moments)
        state, tensors = saved
        return _Held(state.step, state.round, tensors if moments else tensors[:1])

    def _live(self, index: int, moments: bool) -> _Held:
        replica = self._replica
        return _Held(replica.step, replica.round, replica.read_piece(index, moments))


@dataclass(frozen=True)
class _Held:
    """φ, and with the moments δ and AdamW's, over one piece, at one time."""

    step: int
    round: int
    tensors: list[torch.Tensor]


def _piece_of(index: int, held: _Held) -> Answer[StatePiece]:
    reply = StatePiece(index=index, step=held.step, round=held.round, digest=digest_of(held.tensors))
    return Answer(reply, [encode(tensor, "fp32") for tensor in held.tensors])


def _sample_of(positions: Sequence[int], held: _Held) -> Answer[StateSample]:
    entries = len(held.tensors[0])
    if max(positions) >= entries:
        raise Refused("no-such-position", f"this piece has {entries} entries")
    sample = sample_of(held.tensors, positions, held.step, held.round)
    reply = StateSample(
        step=held.step, round=held.round, sizes=list(sample.sizes), largest=list(sample.largest)
    )
    return Answer(reply, [encode(sample.phi, "fp32")])


def piece_count(parameters: int) -> int:
    return -(-parameters // PIECE_PARAMETERS)


def within_piece(entries: slice, number: int) -> slice:
    """The part of a stage's entries that is in the piece, counted from its start."""
    start = number * PIECE_PARAMETERS
    return slice(*(min(max(end - start, 0), PIECE_PARAMETERS) for end in (entries.start, entries.stop)))


async def fetch_piece(
    rpc: Rpc, peer: PeerId, stage: int, parameters: int, number: int, *, moments: bool
) -> tuple[StatePiece, list[torch.Tensor]]:
    """One replica's φ over one piece, with `moments` also δ and AdamW's moments, each [entries of the piece].

    Deadline: `PIECE_DEADLINE`. May be repeated. Raises what `Rpc.call` raises, and `CodecError` when what came is
    damaged, not finite or of another shape.
    """
    request = GetStatePiece(stage=stage, index=number, moments=moments)
    size = min(PIECE_PARAMETERS, parameters - number * PIECE_PARAMETERS)

    def read(piece: StatePiece, tensors: list[torch.Tensor]) -> tuple[StatePiece, list[torch.Tensor]]:
        require_undamaged(piece, tensors, number, size)
        return piece, tensors

    return await rpc.call_and_read(peer, request, deadline=PIECE_DEADLINE, read=read)


def require_undamaged(piece: StatePiece, tensors: list[torch.Tensor], number: int, size: int) -> None:
    """Check that a piece is the one of that number, of `size` entries. Raises `CodecError`."""
    if piece.index != number or any(len(tensor) != size for tensor in tensors):
        raise CodecError("a state piece does not have the expected shape")
    if digest_of(tensors) != piece.digest:
        raise CodecError("a state piece was damaged on the way")


async def fetch_slow_weights(
    rpc: Rpc, stage: int, parameters: int, peer: PeerId
) -> tuple[torch.Tensor, DonorProgress]:
    """Fetch all of one replica's φ, flat float32 [parameters], of one round.

    Raises `JoinError` when the replica goes away, says that it has another number of parameters than the manifest's,
    or ends a round each time before all pieces are here.
    """
    index, _ = await rpc.call(peer, GetStateIndex(), deadline=INDEX_DEADLINE)
    if index.stage != stage or index.parameters != parameters:
        raise later(JoinError(f"Peer {peer} does not serve stage {stage} any more. Try again."))
    for _ in range(TRIES_PER_PIECE):
        flat = torch.empty(parameters)
        numbers = iter(range(piece_count(parameters)))
        seen: list[DonorProgress] = []

        async def work_off(
            flat: torch.Tensor = flat, numbers: Iterator[int] = numbers, seen: list[DonorProgress] = seen
        ) -> None:
            for number in numbers:
                piece, phi = await fetch_slow_piece(rpc, stage, parameters, number, peer)
                flat[number * PIECE_PARAMETERS :][: len(phi)].copy_(phi)
                seen.append(DonorProgress(piece.step, piece.round))

        await all_of(*(work_off() for _ in range(PIECES_IN_FLIGHT)))
        if len({progress.round for progress in seen}) == 1:
            return flat, max(seen, key=lambda progress: progress.step)
    raise later(
        JoinError(
            f"Peer {peer} is too quick for this link: its rounds end before its state is here. Try again."
        )
    )


async def fetch_slow_piece(
    rpc: Rpc, stage: int, parameters: int, number: int, peer: PeerId
) -> tuple[StatePiece, torch.Tensor]:
    """One replica's φ over one piece, the hash verified. Raises `JoinError` after several tries."""
    for _ in range(TRIES_PER_PIECE):
        try:
            piece, [phi] = await fetch_piece(rpc, peer, stage, parameters, number, moments=False)
            return piece, phi
        except NolocoError as failure:
            logger.debug("Piece %d from %s failed: %s", number, peer[-8:], failure)
            last = failure
    raise later(
        JoinError(
            f"Could not download stage {stage}: piece {number} from {peer[-8:]} failed ({last}). "
            "Check the connection and start again; members keep training meanwhile."
        )
    )
