"""Fetching a stage's weights in verified pieces, the mean of several replicas piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from bootstrap.export.sources import Donor
from bootstrap.export.stage_file import StageFile
from node.state.transfer import PIECES_IN_FLIGHT, fetch_slow_piece
from protocol.rpc import Rpc
from protocol.supervision import all_of


class RoundEnded(Exception):
    """A donor's weights are others than those that were begun with."""

    def __init__(self, donor: Donor, round_: int) -> None:
        super().__init__(f"…{donor.peer[-8:]} went on from round {donor.round} to {round_}")


async def fetch_stage(rpc: Rpc, file: StageFile, progress: Callable[[int, int], None]) -> None:
    """Fetch every missing piece of the file; `progress(pieces there, of how many)`.

    Memory: a few pieces, however large the stage. Raises `JoinError` when a donor goes away or sends what its
    hash does not fit, `RoundEnded` when one goes on; what was fetched until then is kept in the file.
    """
    slots = asyncio.Semaphore(PIECES_IN_FLIGHT)
    progress(len(file.present), file.pieces)

    async def fetch(piece: int) -> None:
        async with slots:
            file.store(piece, await _mean(rpc, file, piece))
            progress(len(file.present), file.pieces)

    await all_of(*(fetch(piece) for piece in file.missing))


async def _mean(rpc: Rpc, file: StageFile, piece: int) -> torch.Tensor:
    """The piece's float32 mean over the donors, added up in float64; of a single one its very bits."""
    source = file.source
    total: torch.Tensor | None = None
    for donor in source.donors:
        round_, phi = await fetch_slow_piece(rpc, source.stage, source.parameters, piece, donor.peer)
        if round_ != donor.round:
            raise RoundEnded(donor, round_)
        if len(source.donors) == 1:
            return phi
        total = phi.double() if total is None else total.add_(phi)
    assert total is not None
    return total.div_(len(source.donors)).float()
