"""The microbatches that stage 0 draws from its data, and others in place of those that are dropped."""

from __future__ import annotations

import asyncio
import itertools

from node.context import Context
from node.data.batches import Batch
from node.data.prefetch import Feed, FeedReport
from node.pipeline.gradient_screen import CONTENT
from node.pipeline.pipeline import Pipeline
from protocol.access.peer_limits import doubled
from protocol.errors import Refused
from protocol.supervision import cancelled

FIRST_PAUSE = 0.1  # seconds before another one is drawn, doubling while nothing gets through
LONGEST_PAUSE = 10.0
TOLD_SECONDS = 60.0


class MicrobatchSource:
    """Draws the microbatches of stage 0 from its data, and replacements for those that are dropped."""

    def __init__(
        self, context: Context, pipeline: Pipeline, feed: Feed, life: str, max_seconds: float
    ) -> None:
        """`life` is part of the microbatches' names: those of a restarted node must not repeat earlier ones.

        0 seconds are no limit.
        """
        self._context = context
        self._pipeline = pipeline
        self._feed = feed
        self._report = FeedReport(feed, context.events)
        self._life = life
        self._max_seconds = max_seconds
        self._began = asyncio.get_running_loop().time()
        self._tasks = context.supervisor.group()
        self._ahead: list[asyncio.Task[None]] = []  # the next step's
        self._dropped = DropBackoff()

    def begin(self) -> None:
        """Let the feed read ahead from now on."""
        self._feed.begin()

    async def close(self) -> None:
        """End the tasks and the feed, whatever ended the training, in whichever part of a step."""
        await self._tasks.close()
        self._feed.stop()

    @property
    def out_of_time(self) -> bool:
        """True if the time that the volunteer gave is over."""
        elapsed = asyncio.get_running_loop().time() - self._began
        return bool(self._max_seconds) and elapsed >= self._max_seconds

    async def start_step(self, step: int) -> list[asyncio.Task[None]]:
        """Start this inner step's microbatches; returns their tasks. With staleness also start the next step's."""
        inner = self._context.manifest.inner
        tasks = self._ahead or await self._draw_batch(step)
        self._ahead = []
        if inner.staleness and step + 1 < inner.total_steps:
            try:
                self._ahead = await self._draw_batch(step + 1)
            except BaseException:
                await cancelled(tasks)
                raise
        return tasks

    async def cancel_ahead(self) -> None:
        """Cancel the microbatches of the next step: nobody takes it."""
        await cancelled(self._ahead)

    def commit(self, step: int) -> None:
        """Set the next inner step to `step`: a checkpoint of it goes on after what was taken so far."""
        self._feed.commit(step)

    def tell(self) -> None:
        """Report how long training waited for data."""
        self._context.counters.data_wait = self._feed.waited()
        self._report.tell()

    async def _draw_batch(self, step: int) -> list[asyncio.Task[None]]:
        batches = await self._feed.take(self._context.manifest.inner.microbatches)
        return [
            self._tasks.start(self._train_one(f"{step}-{index}-{self._life}", batch), "a microbatch")
            for index, batch in enumerate(batches)
        ]

    async def _train_one(self, name: str, batch: Batch) -> None:
        """Train one microbatch, or others in its place until one goes through: a step takes exactly its batch."""
        for attempt in itertools.count():
            try:
                await self._pipeline.draw(f"{name}.{attempt}" if attempt else name, batch)
            except Refused as refusal:
                if refusal.code not in CONTENT:
                    raise
                await self._dropped_one(refusal)
                batch = await self._feed.take_another()
            else:
                self._dropped.reset()
                return

    async def _dropped_one(self, refusal: Refused) -> None:
        context, pause = self._context, self._dropped.note()
        if count := self._dropped.due_report(asyncio.get_running_loop().time()):
            context.events.warn(
                f"{count} microbatches were dropped for what they hold ({refusal}); others are drawn in their place. "
                "If none goes through, look at the log of the nodes of later stages.",
                "microbatches-dropped",
                count=count,
                code=refusal.code,
            )
        await asyncio.sleep(pause)


class DropBackoff:
    """Spaces out replacements for dropped microbatches and says when to report them."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._untold = 0
        self._told = float("-inf")

    def note(self) -> float:
        """Note another dropped one; returns the seconds to wait before the next is drawn."""
        self._untold += 1
        self._in_a_row += 1
        return doubled(FIRST_PAUSE, self._in_a_row - 1, LONGEST_PAUSE)

    def reset(self) -> None:
        self._in_a_row = 0

    def due_report(self, now: float) -> int:
        """The number to report at loop time `now`; 0 when it is too soon."""
        if now - self._told < TOLD_SECONDS:
            return 0
        self._told, count = now, self._untold
        self._untold = 0
        return count
