"""When a node saves its replica, and how it takes it up again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from node.context import Context
from node.data.batches import Position
from node.model.compute import Priority
from node.model.flat import StageState
from node.model.inner import are_finite
from node.model.replica import Replica
from node.model.state_directory import Checkpoint, StateDirectory
from protocol.errors import CodecError, OutOfMemory, StateError

LEAST_SECONDS = 10.0
SHARE_OF_TIME = 0.01  # may go into writing checkpoints


class Checkpoints:
    """Without a state directory (simulations) nothing is saved."""

    def __init__(
        self,
        context: Context,
        replica: Replica,
        state: StateDirectory | None,
        position: Callable[[int], Position | None] = lambda step: None,
    ) -> None:
        """`position` tells where in the data training was after an inner step."""
        self._context = context
        self._replica = replica
        self._state = state
        self._position = position

    def stop(self) -> None:
        self._state = None

    async def save(self) -> None:
        """Write a checkpoint. Raises `StateError`; the previous one then stays valid."""
        if self._state is None:
            return
        context = self._context
        try:
            snapshot = await context.compute.run(Priority.OPTIMIZER, self._replica.snapshot)
        except OutOfMemory:
            raise StateError(
                "There is no memory for a copy of the weights: this checkpoint is skipped, the last one stays. "
                "Close other programs, or give this node more with --max-memory."
            ) from None
        if not await asyncio.to_thread(are_finite, snapshot.tensors().values()):
            raise StateError(
                "The weights are NaN or infinity: they are not saved, and the last checkpoint stays."
            )
        checkpoint = Checkpoint(
            context.stage,
            snapshot,
            self._position(snapshot.step),
            context.counters.tokens_stepped,
            context.transport.now(),
        )
        await asyncio.to_thread(self._state.save_checkpoint, context.run_id, checkpoint)
        context.events.emit("checkpoint", step=snapshot.step, round=snapshot.round)

    async def save_regularly(self, most_seconds: float) -> None:
        """For ever: as often as it costs little, and every `most_seconds` at least."""
        if self._state is None:
            return
        pause = min(most_seconds, LEAST_SECONDS)
        while True:
            await asyncio.sleep(pause)
            began = asyncio.get_running_loop().time()
            try:
                await self.save()
                cost = asyncio.get_running_loop().time() - began
                pause = min(most_seconds, max(LEAST_SECONDS, cost / SHARE_OF_TIME))
            except StateError as error:
                self._context.events.warn(str(error), "checkpoint-failed")

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this stage. Raises `StateError` when it does not fit the run."""
        context, state = self._context, checkpoint.state
        try:
            await context.compute.run(Priority.OPTIMIZER, self._work_restore, state)
        except CodecError as error:
            raise StateError(
                f"The checkpoint does not fit this run's stage {checkpoint.stage} ({error}). "
                "Delete checkpoint.safetensors in the state directory to start from other replicas."
            ) from None
        context.counters.restore(checkpoint.tokens)
        context.events.say(
            f"Continuing from the checkpoint at step {state.step}, round {state.round}.",
            "restored",
            step=state.step,
            round=state.round,
        )

    async def take_up_last(self) -> bool:
        """Instead of weights that were lost: the last checkpoint's, counted as if they were of the present step.

        False when there is none that fits. The data go on from where they are.
        """
        context, replica = self._context, self._replica
        try:
            checkpoint = None if self._state is None else self._state.checkpoint(context.run_id)
            if checkpoint is None or checkpoint.stage != context.stage:
                return False
            state = replace(checkpoint.state, step=replica.step)
            await context.compute.run(Priority.OPTIMIZER, self._work_restore, state)
        except (StateError, CodecError):
            return False
        return True

    def _work_restore(self, state: StageState) -> None:
        self._replica.restore(state)
