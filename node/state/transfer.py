"""State of a stage from its replicas, in pieces: for late joiners, for export and for measuring the spread.

A piece holds the same range of φ, δ and AdamW's moments of one replica and is complete in itself. Replicas of
a stage are near each other, so pieces of several of them together are a valid start: a donor that dies or
moves on costs one piece, never the download, and no donor is locked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node.model.compute import Compute, Priority
from node.model.replica import PIECE_PARAMETERS, Replica, digest_of
from protocol.codec import encode, require_finite
from protocol.errors import CodecError, JoinError, NolocoError, Refused
from protocol.messages import GetStateIndex, GetStatePiece, StateIndex, StatePiece
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

PIECE_DEADLINE = 60.0
INDEX_DEADLINE = 10.0
PIECES_IN_FLIGHT = 4
TRIES_PER_PIECE = 6

Store = Callable[[int, list[torch.Tensor]], None]


@dataclass(frozen=True)
class Progress:
    """How far the donors were: the furthest of them counts."""

    step: int
    round: int


class StateService:
    """Gives pieces of the own state to whoever asks."""

    def __init__(self, stage: int, replica: Replica, compute: Compute) -> None:
        self._stage = stage
        self._replica = replica
        self._compute = compute

    async def on_index(self, request: Request) -> Answer:
        replica = self._replica
        return Answer(
            StateIndex(
                stage=self._stage,
                step=replica.step,
                round=replica.round,
                parameters=replica.parameters,
                piece_parameters=PIECE_PARAMETERS,
            )
        )

    async def on_piece(self, request: Request) -> Answer:
        message: GetStatePiece = request.message
        if message.stage != self._stage:
            raise Refused("other-stage", f"this node serves stage {self._stage}")
        return await self._compute.run(Priority.SERVE, self._piece, message)

    def _piece(self, message: GetStatePiece) -> Answer:
        tensors = self._replica.read_piece(message.index, message.moments)
        reply = StatePiece(
            index=message.index,
            step=self._replica.step,
            round=self._replica.round,
            digest=digest_of(tensors),
        )
        return Answer(reply, [encode(tensor, "fp32") for tensor in tensors])


async def download_state(
    rpc: Rpc, stage: int, parameters: int, donors: Callable[[], Sequence[PeerId]], store: Store
) -> Progress:
    """Fetch φ, δ and moments of every piece from the live donors in turn and `store` each.

    Raises `JoinError` when a piece could not be had from anyone after several tries. The download may be
    repeated; what was stored until then must not be mixed with weights of another origin.
    """
    return await _fetch_all(rpc, stage, parameters, donors, store, moments=True)


async def fetch_slow_weights(rpc: Rpc, stage: int, peer: PeerId) -> tuple[torch.Tensor, Progress]:
    """All of one replica's φ, flat float32, of one round.

    Raises `JoinError` when the replica goes away, or ends a round each time before all pieces are here.
    """
    index, _ = await rpc.call(peer, Traffic.STATE, GetStateIndex(), StateIndex, deadline=INDEX_DEADLINE)
    if index.stage != stage or index.parameters > 2**40:
        raise JoinError(f"Peer {peer} does not serve stage {stage} any more. Try again.")
    for _ in range(TRIES_PER_PIECE):
        flat = torch.empty(index.parameters)

        def keep(number: int, tensors: list[torch.Tensor], flat: torch.Tensor = flat) -> None:
            start = number * PIECE_PARAMETERS
            flat[start : start + PIECE_PARAMETERS].copy_(tensors[0])

        rounds: set[int] = set()
        progress = await _fetch_all(
            rpc, stage, index.parameters, lambda: [peer], keep, moments=False, rounds=rounds
        )
        if len(rounds) == 1:
            return flat, progress
    raise JoinError(f"Peer {peer} is too quick for this link: its rounds end before its state is here.")


async def fetch_slow_piece(
    rpc: Rpc, stage: int, parameters: int, number: int, peer: PeerId
) -> tuple[int, torch.Tensor]:
    """(round, φ over one piece) of one replica, the hash verified. Raises `JoinError` when it cannot be had."""
    got: list[torch.Tensor] = []
    piece = await _fetch_piece(
        rpc, stage, parameters, number, lambda: [peer], lambda _, tensors: got.extend(tensors), moments=False
    )
    return piece.round, got[0]


async def _fetch_all(
    rpc: Rpc,
    stage: int,
    parameters: int,
    donors: Callable[[], Sequence[PeerId]],
    store: Store,
    *,
    moments: bool,
    rounds: set[int] | None = None,
) -> Progress:
    slots = asyncio.Semaphore(PIECES_IN_FLIGHT)
    furthest = Progress(0, 0)

    async def fetch(number: int) -> None:
        nonlocal furthest
        async with slots:
            piece = await _fetch_piece(rpc, stage, parameters, number, donors, store, moments)
            furthest = Progress(max(furthest.step, piece.step), max(furthest.round, piece.round))
            if rounds is not None:
                rounds.add(piece.round)

    count = -(-parameters // PIECE_PARAMETERS)
    tasks = [asyncio.get_running_loop().create_task(fetch(number)) for number in range(count)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return furthest


async def _fetch_piece(
    rpc: Rpc,
    stage: int,
    parameters: int,
    number: int,
    donors: Callable[[], Sequence[PeerId]],
    store: Store,
    moments: bool,
) -> StatePiece:
    size = min(PIECE_PARAMETERS, parameters - number * PIECE_PARAMETERS)
    failures: list[str] = []
    for attempt in range(TRIES_PER_PIECE):
        live = donors()
        if not live:
            failures.append("no live replica")
            await asyncio.sleep(0.5)
            continue
        donor = live[(number + attempt) % len(live)]
        try:
            piece, tensors = await rpc.call(
                donor,
                Traffic.STATE,
                GetStatePiece(stage=stage, index=number, moments=moments),
                StatePiece,
                deadline=PIECE_DEADLINE,
            )
            _check(piece, tensors, number, size, moments)
        except NolocoError as failure:
            failures.append(f"{donor[-8:]}: {failure}")
            logger.debug("Piece %d from %s failed: %s", number, donor[-8:], failure)
            continue
        store(number, tensors)
        return piece
    raise JoinError(
        f"Could not download stage {stage}: piece {number} failed ({failures[-1]}). "
        "Check the connection and start again; members keep training meanwhile."
    )


def _check(piece: StatePiece, tensors: list[torch.Tensor], number: int, size: int, moments: bool) -> None:
    if piece.index != number or [tuple(t.shape) for t in tensors] != [(size,)] * (4 if moments else 1):
        raise CodecError("a state piece does not have the expected shape")
    if digest_of(tensors) != piece.digest:
        raise CodecError("a state piece was damaged on the way")
    for tensor in tensors:
        require_finite(tensor)
