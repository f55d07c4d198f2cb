"""Finds a replica's first state: what it saved, other replicas', or what the run starts from."""

from __future__ import annotations

import asyncio
import contextlib
from statistics import median, median_low

from node.context import Context
from node.membership.discovery import Discovery
from node.model.compute import Priority
from node.model.pretrained import Pretrained, load_stage
from node.model.replica import Replica
from node.state.checkpoints import Checkpoints
from node.storage.checkpoint_files import Checkpoint
from node.trainer import Trainer
from protocol.errors import CheckpointError, JoinError
from protocol.ground import PeerId

DOWNLOADS = 3  # tries to get the state of the stage that a node moves to
PAUSE_SECONDS = 5.0  # between them
# a checkpoint from which the live replicas have gone on for so many is not worth going on from
OLD_ROUNDS = 4


class FirstState:
    """Gives a replica its first state; the trainer downloads that of live replicas.

    `pretrained` names the checkpoint that the volunteer has of what the run starts from; empty for none.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        checkpoints: Checkpoints,
        discovery: Discovery,
        trainer: Trainer,
        pretrained: str,
    ) -> None:
        self._context = context
        self._replica = replica
        self._checkpoints = checkpoints
        self._discovery = discovery
        self._trainer = trainer
        self._pretrained = pretrained

    async def load(self, checkpoint: Checkpoint | None, is_move: bool) -> bool:
        """Load the own checkpoint when it is recent, else the state of live replicas, else what the run starts from.

        False when this node was told to leave while it waited for others' weights. Raises `StateError` when the
        own checkpoint does not fit, `CheckpointError` when the one named by the volunteer is not the run's, and
        after a move `JoinError` when there are replicas and none gives its state.
        """
        stage, events, manifest = self._context.stage, self._context.events, self._context.manifest
        if self._pretrained and manifest.start is None:
            raise CheckpointError(
                f"Run '{manifest.name}' starts from random weights, not from {self._pretrained}. Leave "
                "--from-checkpoint out, or found a run with it: noloco-bootstrap --from-checkpoint."
            )
        if checkpoint is not None and checkpoint.stage == stage:
            if self.rounds_missed(checkpoint) < OLD_ROUNDS:
                await self._checkpoints.restore(checkpoint)
                self._note_alone()
                return True
            events.say("The saved state is far behind the other replicas; taking theirs.", "checkpoint-old")
        if await (self._take_after_move() if is_move else self._take()):
            return True
        return await self._begin(is_move)

    # --- the first replica --------------------------------------------------------------------

    async def _begin(self, is_move: bool) -> bool:
        """Begin where nobody has a state to give. Returns and raises as `load` does."""
        context, source = self._context, self._pretrained
        if context.manifest.start is None:
            source = "the run's seed"  # which the weights were made from
        elif source:
            await context.compute.run(
                Priority.SERVE, load_stage, Pretrained(source), context.manifest, context.stage, self._replica
            )
        elif is_move:
            raise JoinError(
                f"Nobody has the state of stage {context.stage}, and there is no --from-checkpoint."
            )
        else:
            return await self._wait_for_weights(context.manifest.start.name)
        sentence = f"First replica of stage {context.stage}: starting from {source}."
        context.events.say(sentence, "initialised", stage=context.stage)
        self._note_alone()
        return True

    async def _wait_for_weights(self, name: str) -> bool:
        """Wait until a replica has the weights, which this node cannot make; False when it is told to leave."""
        context, stopping = self._context, self._trainer.stopping
        context.events.warn(
            f"Waiting for another replica of stage {context.stage}: the run starts from '{name}', and this node was "
            "given no --from-checkpoint. With one it can be the first.",
            "no-weights",
            stage=context.stage,
        )
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), PAUSE_SECONDS)
            if stopping.is_set():
                return False
            await self._discovery.announce()
            await self._discovery.refresh()
            if self._holders() and await self._trainer.download():
                return True

    def _note_alone(self) -> None:
        """Note if nobody else is seen. Should there be others whom this node cannot see, it finds out later."""
        if not self._holders():
            self._trainer.began_alone()

    # --- other replicas -----------------------------------------------------------------------

    def _holders(self) -> list[PeerId]:
        context = self._context
        holders = context.view.holding(context.stage, context.transport.now())
        return [peer for peer in holders if peer != context.me]

    def rounds_missed(self, checkpoint: Checkpoint) -> float:
        """Rounds that most others ended since it was saved: no more than they are ahead, nor than time allowed them.

        A slow replica is behind them at all times, and so is its checkpoint.
        """
        context, holders, now = self._context, self._holders(), self._context.transport.now()
        others = [m.announcement for m in context.view.members(context.stage, now) if m.peer in holders]
        ahead = median_low([other.round for other in others] or [0]) - checkpoint.state.round
        rates = [other.tokens_per_second for other in others if other.tokens_per_second > 0]
        if not rates or not checkpoint.saved:
            return ahead
        manifest = context.manifest
        sequences = manifest.inner.microbatches * manifest.inner.sequences * manifest.outer.inner_steps
        round_seconds = sequences * manifest.data.sequence_tokens / median(rates)
        return min(ahead, (now - checkpoint.saved) / round_seconds)

    async def _take(self) -> bool:
        """Take the state from a replica; False if there is none. When that fails the own, the seed's, is kept."""
        if not self._holders():
            return False
        return await self._trainer.download() or self._context.manifest.start is None

    async def _take_after_move(self) -> bool:
        """Take the state after a move, again where nobody is found at first: a lookup may fail."""
        for attempt in range(DOWNLOADS):
            await asyncio.sleep(PAUSE_SECONDS if attempt else 0.0)
            await self._discovery.refresh()  # the node's view was that of its old stage
            if self._holders() and await self._trainer.download():
                return True
        if self._holders():
            raise JoinError(f"The state of stage {self._context.stage} could not be downloaded.")
        return False
