"""Where a replica's first state comes from: the own checkpoint, other replicas, or the run's seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node.context import Context
from node.places.discovery import Discovery
from node.state.checkpoints import Checkpoints
from node.state.directory import Checkpoint
from protocol.errors import JoinError
from protocol.transport.base import PeerId

DOWNLOADS = 3  # tries to get the state of the stage that a node moves to
PAUSE_SECONDS = 5.0  # between them
OLD_ROUNDS = 4  # a checkpoint this many rounds behind the live replicas is not worth going on from


class FirstState:
    """`download` takes the state of live replicas and says whether that worked; else the own state is kept."""

    def __init__(
        self,
        context: Context,
        checkpoints: Checkpoints,
        discovery: Discovery,
        download: Callable[[], Awaitable[bool]],
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._discovery = discovery
        self._download = download

    async def load(self, checkpoint: Checkpoint | None, is_move: bool) -> None:
        """From the own checkpoint when it is recent, else from live replicas, else from the seed.

        Raises `StateError` when the checkpoint does not fit, and after a move `JoinError` when there are replicas
        and none gives its state.
        """
        stage, events = self._context.stage, self._context.events
        if checkpoint is not None and checkpoint.stage == stage:
            if self._furthest() - checkpoint.state.round < OLD_ROUNDS:
                await self._checkpoints.restore(checkpoint)
                return
            events.say("The saved state is far behind the other replicas; taking theirs.", "checkpoint-old")
        if not await (self._take_after_move() if is_move else self._take()):
            sentence = f"First replica of stage {stage}: starting from the run's seed."
            events.say(sentence, "initialised", stage=stage)

    def _holders(self) -> list[PeerId]:
        context = self._context
        holders = context.view.holding(context.stage, context.transport.now())
        return [peer for peer in holders if peer != context.me]

    def _furthest(self) -> int:
        """The latest round of the replicas that hold the stage's state."""
        context, holders = self._context, self._holders()
        members = context.view.members(context.stage, context.transport.now())
        return max((m.announcement.round for m in members if m.peer in holders), default=0)

    async def _take(self) -> bool:
        """Whether there is anyone to take the state from. When that fails the own state is kept."""
        if not self._holders():
            return False
        await self._download()
        return True

    async def _take_after_move(self) -> bool:
        """The same, tried again, also where nobody is found at first: a lookup may fail."""
        for attempt in range(DOWNLOADS):
            await asyncio.sleep(PAUSE_SECONDS if attempt else 0.0)
            await self._discovery.refresh()  # the node's view was that of its old stage
            if self._holders() and await self._download():
                return True
        if self._holders():
            raise JoinError(f"The state of stage {self._context.stage} could not be had.")
        return False
