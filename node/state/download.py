"""The download of a stage's state from replicas that belong together, for late joiners and for who was away."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_high

import torch

from node.model.flat import layout
from node.model.muon import muon_range
from node.model.stage import parameter_shapes
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
    within_piece,
)
from node.state.witnesses import (
    FEWEST,
    MOST_WITNESSES,
    DonatedPiece,
    Unlike,
    are_possible,
    compared,
)
from protocol.errors import CodecError, JoinError, NolocoError, later
from protocol.ground import PeerId
from protocol.messages.state import GetStateIndex
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Inner, Manifest
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

MOST_ASKED = 32  # donors: more of them make no download quicker
SURVEYS = 3  # of the donors: whoever gave nothing, and all who gave and went, are replaced by others
SURVEY_PAUSE = 0.5  # seconds before nobody is asked again
TRIES_PER_DONOR = 2  # failures to answer, then it is left alone

State = dict[int, list[torch.Tensor]]  # by piece: φ, δ and AdamW's moments, each [entries of the piece]


@dataclass(frozen=True)
class WantedState:
    """The state to download: a stage's, its number of parameters, and what the manifest says of its replicas."""

    stage: int
    parameters: int
    limits: RunLimits
    inner: Inner
    muons: slice  # entries that Muon trains

    @classmethod
    def of(cls, manifest: Manifest, stage: int, parameters: int) -> WantedState:
        inner = manifest.inner
        slices = layout(parameter_shapes(manifest, stage)) if inner.optimizer == "muon" else []
        return cls(stage, parameters, RunLimits.of(manifest, stage), inner, muon_range(inner, slices))


@dataclass
class _Donor:
    told: DonorProgress
    asked_at: float  # the loop's time
    failures: int = 0
    in_flight: int = 0


@dataclass
class _Download:
    """The download of one stage's state: donors, pieces and what is still missing.

    Mutable state: who told how far it is, the donors of them, who is left out for good, the pieces, whose each is
    and how far those were who gave any.
    """

    rpc: Rpc
    wanted: WantedState
    holders: Callable[[], Sequence[PeerId]]
    rng: random.Random  # draws witnesses and positions
    told: dict[PeerId, DonorProgress] = field(default_factory=dict)
    donors: dict[PeerId, _Donor] = field(default_factory=dict)
    left_out: set[PeerId] = field(default_factory=set)
    pieces: State = field(default_factory=dict)
    whose: dict[int, PeerId] = field(default_factory=dict)
    givers: dict[PeerId, DonorProgress] = field(default_factory=dict)
    failure: str = "no live replica"
    silent: Counter[PeerId] = field(default_factory=Counter)  # samples that were not answered
    has_told_unchecked: bool = False
    tell: Callable[[float], None] = lambda fraction: None


async def download_state(
    rpc: Rpc,
    wanted: WantedState,
    holders: Callable[[], Sequence[PeerId]],
    rng: random.Random,
    tell: Callable[[float], None] = lambda fraction: None,
) -> tuple[State, DonorProgress]:
    """Fetch every piece from donors that are about as far as each other; return what to adopt and how far that is.

    Deadlines: `INDEX_DEADLINE` to ask who is how far, `PIECE_DEADLINE` a piece and `SAMPLE_DEADLINE` to compare it.
    A donor that goes away is replaced by another one of its group, one that serves nonsense costs a piece, one whose
    state is unlike the others' all of its pieces. `rng` must be one that peers cannot guess; `tell` hears which part
    of the pieces is here. Raises `JoinError` when no group of donors gave all pieces; nothing is changed by then and
    the download may be repeated.
    """
    download = _Download(rpc, wanted, holders, rng, tell=tell)
    for attempt in range(SURVEYS):
        if attempt:
            await asyncio.sleep(SURVEY_PAUSE)
        await _survey(download)
        if download.donors and await _fetch_all(download):
            return download.pieces, adopted(list(download.givers.values()), wanted.limits)
    raise later(
        JoinError(
            f"Could not download stage {wanted.stage} ({download.failure}). "
            "Check the connection and start again; members keep training meanwhile."
        )
    )


# --- who gives ----------------------------------------------------------------------------------


async def _survey(download: _Download) -> None:
    """Ask the holders how far they are and take those that belong together; pieces of others are dropped."""
    asked = [peer for peer in download.holders() if peer not in download.left_out]
    if len(asked) > MOST_ASKED:  # at random: an identity that comes first is easily found
        asked = download.rng.sample(asked, MOST_ASKED)
    answers = await all_of(*(_ask(download, peer) for peer in asked))
    told = {peer: progress for peer, progress in zip(asked, answers, strict=True) if progress is not None}
    download.told.update(told)
    chosen, now = together(told), asyncio.get_running_loop().time()
    download.donors = {peer: _Donor(progress, now) for peer, progress in chosen.items()}
    if together({**download.givers, **chosen}).keys() != {*download.givers, *chosen}:
        download.pieces.clear()
        download.whose.clear()
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
    """Fetch all pieces; return whether they are here, False when the donors have gone before."""
    while (missing := _missing(download)) and download.donors:  # again when pieces had to be discarded
        waiting = iter(missing)

        async def work_off(waiting: Iterator[int] = waiting) -> None:
            for number in waiting:
                await _fetch(download, number)

        await all_of(*(work_off() for _ in range(PIECES_IN_FLIGHT)))
    return not missing


def _missing(download: _Download) -> list[int]:
    count = piece_count(download.wanted.parameters)
    return [number for number in range(count) if number not in download.pieces]


async def _fetch(download: _Download, number: int) -> None:
    """Fetch one piece, from one donor after another until there is none."""
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
            if isinstance(failure, Unlike):
                _distrust(download, peer, failure)
            elif isinstance(failure, CodecError):
                download.left_out.add(peer)
            if peer in download.left_out or donor.failures >= TRIES_PER_DONOR:
                download.donors.pop(peer, None)
        finally:
            donor.in_flight -= 1


async def _fetch_from(download: _Download, number: int, peer: PeerId, donor: _Donor) -> None:
    """Fetch one piece from a donor.

    Raises what `fetch_piece` raises, `CodecError` when the piece is not of the state that the donor spoke of, and
    `Unlike`.
    """
    wanted = download.wanted
    piece, tensors = await fetch_piece(
        download.rpc, peer, wanted.stage, wanted.parameters, number, moments=True
    )
    progress = DonorProgress(piece.step, piece.round)
    seconds = asyncio.get_running_loop().time() - donor.asked_at
    if not follows(progress, donor.told, seconds, wanted.limits):
        raise CodecError("a state piece is of another state than the one that was announced")
    _, _, first, second = tensors
    if not are_possible(first, second, wanted.inner, within_piece(wanted.muons, number)):
        raise Unlike("no optimizer makes such moments")
    progress = await _compared(download, number, tensors, peer, progress)
    if peer in download.left_out:
        raise Unlike("another piece of it was unlike the other replicas'")
    download.pieces[number], download.whose[number] = tensors, peer
    download.tell(len(download.pieces) / piece_count(wanted.parameters))
    if peer not in download.givers or progress.step > download.givers[peer].step:
        download.givers[peer] = progress


# --- what the others say ------------------------------------------------------------------------


async def _compared(
    download: _Download, number: int, tensors: Sequence[torch.Tensor], peer: PeerId, progress: DonorProgress
) -> DonorProgress:
    """The donor's progress, at most the median of all. Raises `Unlike` when others hold something else.

    All that told how far they are may be asked, those found to lie among them: to count the rest alone would let
    liars become most. Where they are too few the piece is taken as it is.
    """
    others = [other for other in download.told if other != peer and download.silent[other] < TRIES_PER_DONOR]
    asked = download.rng.sample(others, min(MOST_WITNESSES, len(others)))
    wanted = download.wanted
    claim = DonatedPiece(wanted.stage, wanted.parameters, number, tensors, progress.step, progress.round)
    answers = await compared(download.rpc, claim, asked, wanted.inner, download.rng)
    download.silent.update(witness for witness, sample in answers.items() if sample is None)
    witnesses = [sample for sample in answers.values() if sample is not None]
    if len(witnesses) + 1 < FEWEST:
        _tell_unchecked(download)
        return progress
    step = median_high([progress.step, *(witness.step for witness in witnesses)])
    round_ = median_high([progress.round, *(witness.round for witness in witnesses)])
    return DonorProgress(min(progress.step, step), min(progress.round, round_))


def _tell_unchecked(download: _Download) -> None:
    if not download.has_told_unchecked:
        download.has_told_unchecked = True
        logger.info(
            "The state of stage %d could not be compared: fewer than %d replicas of it answer.",
            download.wanted.stage,
            FEWEST,
        )


def _distrust(download: _Download, peer: PeerId, why: Unlike) -> None:
    """Forget all that the donor gave, and ask it no more."""
    if peer not in download.left_out:
        logger.warning(
            "Peer …%s gives another state of stage %d than its other replicas: %s. Nothing is taken from it.",
            peer[-8:],
            download.wanted.stage,
            why,
        )
    download.left_out.add(peer)
    download.givers.pop(peer, None)
    for number in [number for number, giver in download.whose.items() if giver == peer]:
        del download.pieces[number], download.whose[number]
