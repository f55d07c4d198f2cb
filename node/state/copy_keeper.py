"""Fetches a copy of each stage's state now and then, so that it survives those who train it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from node.membership.discovery import read_stage
from node.membership.view import Member, View
from node.model.fragment import PIECE_PARAMETERS
from node.model.stage import parameter_count
from node.state.download import State, WantedState, download_state
from node.state.transfer import DonorProgress
from node.storage.checkpoint_files import COPIES, Checkpoint
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from protocol.errors import NolocoError, StateError
from protocol.ground import PeerId
from protocol.records.lineage import Lineage
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.windows import window

logger = logging.getLogger(__name__)

BYTES_EACH = 16  # of a parameter, as it is fetched: φ, δ and AdamW's two moments
BYTES_KEPT = 20  # and on disk, with θ
LEAST_SECONDS = 300.0  # between two copies of a stage
MOST_RATE = (
    250_000.0  # bytes per second that fetching takes of this peer's network, on average over all stages
)
LOOK_SECONDS = 15.0  # between looks whether one is due
MOST_BYTES = (
    2_000_000_000  # of all stages' weights and optimizer states, up to which a seed peer keeps copies
)


def nbytes_of_copies(signed: SignedManifest) -> int:
    """Bytes that copies of all stages take on disk."""
    manifest = signed.manifest
    return BYTES_KEPT * sum(parameter_count(manifest, stage) for stage in range(manifest.stages))


def copies_in(directory: Path) -> StateDirectory:
    """The place of copies in a directory that this process has locked; it is made where it is missing."""
    place = directory / COPIES
    place.mkdir(mode=0o700, exist_ok=True)
    return StateDirectory(place)


class CopyKeeper:
    """Keeps a copy of each stage on disk, as recent as the network's share allows.

    A copy is fetched as a newcomer fetches its state: in pieces, from replicas that belong together, each compared
    with what others hold. Of two lineages the older one is kept beside.

    Mutable state: when each stage was copied last.
    """

    def __init__(
        self,
        rpc: Rpc,
        signed: SignedManifest,
        directory: StateDirectory,
        rng: random.Random,
        is_resting: Callable[[], bool] = lambda: False,
    ) -> None:
        """`directory` is where copies are kept; `rng` must be one that peers cannot guess.

        While it `is_resting`, as a paused node is, it fetches nothing.
        """
        self._is_resting = is_resting
        self._rpc = rpc
        self._signed = signed
        self.directory = directory
        self._rng = rng
        self._copied_at: dict[int, float] = {}

    @window
    def __repr__(self) -> str:
        stages = ", ".join(str(stage) for stage in sorted(self._copied_at))
        return f"Directory: {self.directory.path} | Stages copied in this life: {stages or 'none'}"

    @property
    def pause(self) -> float:
        """Seconds between two copies of a stage."""
        manifest = self._signed.manifest
        whole = BYTES_EACH * sum(parameter_count(manifest, stage) for stage in range(manifest.stages))
        return max(LEAST_SECONDS, whole / MOST_RATE)

    async def run(self) -> None:
        """Look every `LOOK_SECONDS` whether a copy is due, for ever."""
        while True:
            for stage in range(self._signed.manifest.stages):
                now = asyncio.get_running_loop().time()
                if not self._is_resting() and now - self._copied_at.get(stage, -math.inf) >= self.pause:
                    try:
                        await self.copy(stage)
                    except (NolocoError, OSError, MemoryError) as problem:
                        logger.debug("No copy of stage %d: %s", stage, problem)
            await asyncio.sleep(LOOK_SECONDS)

    async def copy(self, stage: int) -> bool:
        """Fetch a copy of the stage; False where nobody has a step of it yet.

        Raises `JoinError` when nobody gives all of it and `StateError` when it cannot be written; the copy from
        before stays.
        """
        manifest, transport, view = self._signed.manifest, self._rpc.transport, View()
        await read_stage(transport, self._signed.run_id, stage, view)
        now = transport.now()
        holding = {*view.holding(stage, now)} - {transport.peer_id}
        members = [m for m in view.members(stage, now) if m.peer in holding and m.announcement.step]
        lineage = lineage_to_keep(members, manifest.limits.record_lifetime)
        if lineage is None:
            return False
        alike = [
            m for m in members if m.announcement.lineage.is_same(lineage, manifest.limits.record_lifetime)
        ]
        donors: list[PeerId] = [member.peer for member in alike]
        wanted = WantedState.of(manifest, stage, parameter_count(manifest, stage))
        pieces, progress = await download_state(self._rpc, wanted, lambda: donors, self._rng)
        checkpoint = await asyncio.to_thread(_checkpoint_of, wanted, pieces, progress, lineage, now)
        if checkpoint.state.step:
            await asyncio.to_thread(self.directory.save_checkpoint, self._signed.run_id, checkpoint)
            self._copied_at[stage] = asyncio.get_running_loop().time()
            logger.debug("Kept a copy of stage %d at step %d", stage, checkpoint.state.step)
        return True


def lineage_to_keep(members: Sequence[Member], lifetime: float) -> Lineage | None:
    """The lineage that most replicas of a stage have, the oldest of equally many; None without any."""

    def count(lineage: Lineage) -> int:
        return sum(m.announcement.lineage.is_same(lineage, lifetime) for m in members)

    lineages = sorted({m.announcement.lineage for m in members})
    return max(lineages, key=count, default=None)  # the first of equals


def _checkpoint_of(
    wanted: WantedState, pieces: State, progress: DonorProgress, lineage: Lineage, now: float
) -> Checkpoint:
    """Put the pieces together. A newcomer's θ begins at φ, and so does a copy's."""
    flat = [torch.empty(wanted.parameters) for _ in range(4)]
    for number, tensors in pieces.items():
        bounds = slice(number * PIECE_PARAMETERS, number * PIECE_PARAMETERS + len(tensors[0]))
        for target, tensor in zip(flat, tensors, strict=True):
            target[bounds].copy_(tensor)
    phi, delta, first, second = flat
    if not all(bool(torch.isfinite(tensor).all()) for tensor in flat):
        raise StateError("the copy is not finite")
    state = StageState(
        progress.step, progress.round, 0, progress.step, phi, phi, delta, first, second, lineage=lineage
    )
    return Checkpoint(wanted.stage, state, saved=now)
