"""Checkpoints of a node: when it saves its replica, and how it takes it up again.

Training goes on meanwhile: the state is copied in parts that hold no microbatch up by more than a twentieth of its
time (`node.model.snapshot`), and written by another thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from node.context import Context
from node.model.compute import Priority
from node.model.inner import are_finite
from node.model.replica import Replica
from node.model.resources import named
from node.model.snapshot import Snapshots
from node.storage.checkpoint_files import Checkpoint, path_of
from node.storage.position import Position
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from protocol.errors import CodecError, OutOfMemory, StateError
from protocol.windows import window

LEAST_SECONDS = 10.0
SHARE_OF_TIME = 0.01  # may go into writing checkpoints
STEP_SECONDS = 60.0  # how long a regular one waits for the end of an inner step
# Of a forward or backward pass, for a part of the copy: with the time that the last 64 KiB go beyond it, below 5 %.
SHARE_OF_PASS = 0.04
FIRST_PART_SECONDS = 0.01  # where no pass has run yet
NO_MEMORY = (
    "There is no memory for a copy of the weights: this checkpoint is skipped, the last one stays. "
    "Close other programs, or give this node more with --max-memory."
)


class Checkpoints:
    """Saves and restores a replica; without a state directory (simulations) nothing is saved.

    Mutable state: the save under way, and what the last one cost.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        state: StateDirectory | None,
        position: Callable[[int], Position | None] = lambda step: None,
        most_stages: int = 0,
        most_days: float = 0.0,
    ) -> None:
        """`position` tells where in the data training was after an inner step.

        Of other stages that this node has served, the last `most_stages` checkpoints are kept for `most_days`.
        """
        self._context = context
        self._replica = replica
        self._state = state
        self._position = position
        self._kept_for = most_stages, most_days * 86_400
        self._saving = asyncio.Lock()
        self._stepped = asyncio.Event()
        self._seconds = 0.0  # that writing the last one took

    @window
    def __repr__(self) -> str:
        place = "nowhere" if self._state is None else str(self._state.path)
        doing = "saving" if self._saving.locked() else "idle"
        return f"Stage: {self._context.stage} | To: {place} | {doing} | Writing took: {self._seconds:.2f} s"

    def stop(self) -> None:
        self._state = None

    def step_done(self) -> None:
        """Note the end of an inner step: until the next one nothing of the state changes, a good time to copy it."""
        self._stepped.set()

    async def save(self) -> None:
        """Write a checkpoint, all of it of one instant. Raises `StateError`; the previous one then stays valid."""
        directory = self._state
        if directory is None:
            return
        async with self._saving:
            checkpoint = await self.taken()
            clock = asyncio.get_running_loop().time
            began = clock()
            await asyncio.to_thread(self._write, directory, checkpoint)
            self._seconds = clock() - began
        state = checkpoint.state
        self._context.events.emit("checkpoint", step=state.step, round=state.round)

    async def taken(self) -> Checkpoint:
        """A copy of one instant on the host. Raises `StateError` without memory for it, and when it is NaN."""
        try:
            checkpoint = await self._copied()
        except (OutOfMemory, MemoryError, RuntimeError) as error:
            if not isinstance(named(error), OutOfMemory):
                raise
            raise StateError(NO_MEMORY) from None
        if not await asyncio.to_thread(are_finite, checkpoint.state.tensors().values()):
            raise StateError(
                "The weights are NaN or infinity: they are not saved, and the last checkpoint stays."
            )
        return checkpoint

    async def _copied(self) -> Checkpoint:
        context, snapshots = self._context, self._replica.snapshots
        room = await asyncio.to_thread(snapshots.room)
        instant = await context.compute.run(Priority.OPTIMIZER, snapshots.begin, room)
        position, tokens = self._position(instant.step), context.counters.tokens_stepped
        saved = context.transport.now()
        try:
            while not await self._copy_part(snapshots):
                pass
            state = await asyncio.to_thread(snapshots.landed)
        finally:
            snapshots.give_up()
        return Checkpoint(context.stage, state, position, tokens, saved)

    async def _copy_part(self, snapshots: Snapshots) -> bool:
        """Copy a part; return whether it was the last. On a GPU all are copied beside the compute thread's work."""
        compute = self._context.compute
        if snapshots.are_beside:
            return await asyncio.to_thread(snapshots.advance, math.inf, time.monotonic)
        seconds = SHARE_OF_PASS * compute.pass_seconds() or FIRST_PART_SECONDS
        return await compute.run(Priority.SNAPSHOT, snapshots.advance, seconds, compute.clock)

    def _write(self, directory: StateDirectory, checkpoint: Checkpoint) -> None:
        try:
            directory.save_checkpoint(self._context.run_id, checkpoint)
            directory.prune(self._context.run_id, checkpoint.stage, checkpoint.saved, *self._kept_for)
        finally:
            self._replica.snapshots.keep(checkpoint.state)

    async def try_to_save(self) -> None:
        """Save; tell why when that fails."""
        try:
            await self.save()
        except StateError as error:
            self._context.counters.cannot_save = True
            self._context.events.warn(str(error), "checkpoint-failed")
        else:
            self._context.counters.cannot_save = False

    async def save_regularly(self, most_seconds: float) -> None:
        """Save for ever: as often as it costs little, and every `most_seconds` at least."""
        if self._state is None:
            return
        pause = min(most_seconds, LEAST_SECONDS)
        while True:
            await asyncio.sleep(pause)
            self._stepped.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stepped.wait(), STEP_SECONDS)
            await self.try_to_save()
            pause = min(most_seconds, max(LEAST_SECONDS, self._seconds / SHARE_OF_TIME))

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this stage. Raises `StateError` when it does not fit the run."""
        context, state = self._context, checkpoint.state
        try:
            _require_possible(state, context.manifest.most_steps(checkpoint.stage))
            await context.compute.run(Priority.OPTIMIZER, self._work_restore, state)
        except CodecError as error:
            raise StateError(
                f"The checkpoint does not fit this run's stage {checkpoint.stage} ({error}). "
                f"Delete {path_of(Path(), checkpoint.stage)} in the state directory to start from other replicas."
            ) from None
        context.counters.restore(checkpoint.tokens)
        context.events.say(
            f"Continuing from the checkpoint at step {state.step}, round {state.round}.",
            "restored",
            step=state.step,
            round=state.round,
        )

    async def of_stage(self, given: Checkpoint | None) -> Checkpoint | None:
        """The checkpoint to go on from: the `given` one if it is of this stage, else the last one on disk.

        The replica has its lineage from then on, so that the node's record says it from the first. Raises
        `StateError` when the one on disk is damaged.
        """
        stage = self._context.stage
        checkpoint = given if given is not None and given.stage == stage else None
        if checkpoint is None and self._state is not None:
            checkpoint = await asyncio.to_thread(self._state.checkpoint, self._context.run_id, stage)
        if checkpoint is not None:
            self._replica.lineage = checkpoint.state.lineage
        return checkpoint

    async def take_up_last(self) -> bool:
        """Take up the last checkpoint's weights instead of lost ones, counted as if they were of the present step.

        False when there is none that fits. The data go on from where they are.
        """
        context, replica = self._context, self._replica
        try:
            stage = context.stage
            checkpoint = None if self._state is None else self._state.checkpoint(context.run_id, stage)
            if checkpoint is None:
                return False
            state = replace(checkpoint.state, step=replica.step)
            await context.compute.run(Priority.OPTIMIZER, self._work_restore, state)
        except (StateError, CodecError):
            return False
        return True

    def _work_restore(self, state: StageState) -> None:
        self._replica.restore(state)


def _require_possible(state: StageState, most_steps: int) -> None:
    """Refuse what no training of the run leads to. Raises `CodecError`."""
    if state.step > most_steps:
        raise CodecError(f"it is of step {state.step}, and a replica of this stage does {most_steps} at most")
    if state.second_moment.numel() and state.second_moment.min() < 0:
        raise CodecError("its mean of squares is below 0")
