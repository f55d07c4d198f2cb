"""The download of a stage's state from replicas that belong together, for late joiners and for who was away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from node.state.transfer import (
    INDEX_DEADLINE,
    PIECES_IN_FLIGHT,
    DonorProgress,
    RunLimits,
    adopted,
    fetch_piece,
    follows,
    piece_count,
    together,
)
from protocol.errors import CodecError, JoinError, NolocoError
from protocol.messages.peers import GetStateIndex
from protocol.rpc import Rpc
from protocol.supervision import all_of
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

MOST_ASKED = 32  # donors: more of them make no download quicker
SURVEYS = 3  # of the donors: whoever gave nothing, and all who gave and went, are replaced by others
SURVEY_PAUSE = 0.5  # seconds before nobody is asked again
TRIES_PER_DONOR = 2  # failures to answer, then it is left alone

State = dict[int, list[torch.Tensor]]  # by piece: φ, δ and AdamW's moments, each [entries of the piece]


@dataclass(frozen=True)
class WantedState:
    """Which state: a stage's, its number of parameters, and what the manifest says of its replicas."""

    stage: int
    parameters: int
    limits: RunLimits


@dataclass
class _Donor:
    told: DonorProgress
    asked_at: float  # the loop's time
    failures: int = 0
    in_flight: int = 0


@dataclass
class _Download:
    """Mutable state: the donors by peer, who is left out for good, the pieces and who gave some."""

    rpc: Rpc
    wanted: WantedState
    holders: Callable[[], Sequence[PeerId]]
    donors: dict[PeerId, _Donor] = field(default_factory=dict)
    left_out: set[PeerId] = field(default_factory=set)
    pieces: State = field(default_factory=dict)
    givers: dict[PeerId, DonorProgress] = field(default_factory=dict)  # of the pieces, and how far they were
    failure: str = "no live replica"


async def download_state(
    rpc: Rpc, wanted: WantedState, holders: Callable[[], Sequence[PeerId]]
) -> tuple[State, DonorProgress]:
    """Fetch every piece from donors that are about as far as each other; what to adopt and how far that is.

    Deadlines: `INDEX_DEADLINE` to ask who is how far, `PIECE_DEADLINE` a piece. A donor that goes away is replaced
    by another one of its group, one that serves nonsense costs a piece. Raises `JoinError` when no group of donors
    gave all pieces; nothing is changed by then and the download may be repeated.
    """
    download = _Download(rpc, wanted, holders)
    for attempt in range(SURVEYS):
        if attempt:
            await asyncio.sleep(SURVEY_PAUSE)
        await _survey(download)
        if download.donors and await _fetch_all(download):
            return download.pieces, adopted(list(download.givers.values()), wanted.limits)
    raise JoinError(
        f"Could not download stage {wanted.stage} ({download.failure}). "
        "Check the connection and start again; members keep training meanwhile."
    )


# --- who gives ----------------------------------------------------------------------------------


async def _survey(download: _Download) -> None:
    """Ask the holders how far they are and take those that belong together; pieces of others are dropped."""
    asked = [peer for peer in download.holders() if peer not in download.left_out][:MOST_ASKED]
    answers = await all_of(*(_ask(download, peer) for peer in asked))
    told = {peer: progress for peer, progress in zip(asked, answers, strict=True) if progress is not None}
    chosen, now = together(told), asyncio.get_running_loop().time()
    download.donors = {peer: _Donor(progress, now) for peer, progress in chosen.items()}
    if together({**download.givers, **chosen}).keys() != {*download.givers, *chosen}:
        download.pieces.clear()
        download.givers.clear()


async def _ask(download: _Download, peer: PeerId) -> DonorProgress | None:
    wanted = download.wanted
    try:
        index, _ = await download.rpc.call(peer, GetStateIndex(), deadline=INDEX_DEADLINE)
    except NolocoError as failure:
        download.failure = f"{peer[-8:]}: {failure}"
        return None
    if index.stage != wanted.stage or index.parameters != wanted.parameters:
        download.left_out.add(peer)
        return None
    return DonorProgress(index.step, index.round)


# --- what they give -----------------------------------------------------------------------------


async def _fetch_all(download: _Download) -> bool:
    """Whether all pieces are here; False when the donors have gone before."""
    missing = [
        number for number in range(piece_count(download.wanted.parameters)) if number not in download.pieces
    ]
    waiting = iter(missing)

    async def work_off() -> None:
        for number in waiting:
            await _fetch(download, number)

    await all_of(*(work_off() for _ in range(PIECES_IN_FLIGHT)))
    return all(number in download.pieces for number in missing)


async def _fetch(download: _Download, number: int) -> None:
    """One piece, from one donor after another until there is none."""
    while download.donors:
        # who never failed, then who has the least to send
        peer, donor = min(download.donors.items(), key=lambda one: (one[1].failures, one[1].in_flight))
        donor.in_flight += 1
        try:
            await _fetch_from(download, number, peer, donor)
            return
        except NolocoError as failure:
            download.failure = f"piece {number} from {peer[-8:]}: {failure}"
            logger.debug("Piece %d from %s failed: %s", number, peer[-8:], failure)
            donor.failures += 1
            if isinstance(failure, CodecError):
                download.left_out.add(peer)
            if peer in download.left_out or donor.failures >= TRIES_PER_DONOR:
                download.donors.pop(peer, None)
        finally:
            donor.in_flight -= 1


async def _fetch_from(download: _Download, number: int, peer: PeerId, donor: _Donor) -> None:
    """Raises as `fetch_piece`, and `CodecError` when the piece is not of the state that the donor spoke of."""
    wanted = download.wanted
    piece, tensors = await fetch_piece(
        download.rpc, peer, wanted.stage, wanted.parameters, number, moments=True
    )
    progress = DonorProgress(piece.step, piece.round)
    seconds = asyncio.get_running_loop().time() - donor.asked_at
    if not follows(progress, donor.told, seconds, wanted.limits):
        raise CodecError("a state piece is of another state than the one that was announced")
    download.pieces[number] = tensors
    if peer not in download.givers or progress.step > download.givers[peer].step:
        download.givers[peer] = progress
