"""The replica's own rhythm: a batch, an inner step, and every k of them a round."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

import torch

from node.context import Context
from node.data.feed import Feed, FeedReport
from node.model.compute import Priority
from node.model.replica import Replica
from node.pipeline.pipeline import Pipeline
from node.rounds.rounds import Rounds
from node.rounds.swap import cancelled
from node.state.checkpoints import Checkpoints
from node.state.healing import Healing
from node.state.transfer import download_state
from protocol.errors import JoinError, NolocoError, TransportDown

logger = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.25
LAST_ROUND_SECONDS = 3.0  # a replica that has finished looks this long for a partner for its last round


class Trainer:
    """Mutable state: whether to stop, the microbatches drawn ahead, and the loop time at which training began."""

    def __init__(
        self,
        context: Context,
        replica: Replica,
        pipeline: Pipeline,
        rounds: Rounds,
        feed: Feed | None,
        checkpoints: Checkpoints,
        rng: random.Random,
        max_seconds: float,
    ) -> None:
        self._context = context
        self._replica = replica
        self._pipeline = pipeline
        self._rounds = rounds
        self._matchmaker = rounds.matchmaker
        self._healing = Healing(context, replica, checkpoints, rounds.abandon, self.download)
        self._feed = feed
        self._feed_report = FeedReport(feed, context.events) if feed is not None else None
        self._life = f"{rng.getrandbits(32):08x}"  # ids of a restarted node must not repeat earlier ones
        self._max_seconds = max_seconds
        self._began = asyncio.get_running_loop().time()
        self.stopping = asyncio.Event()  # set by `stop`
        self._drawn_ahead: list[asyncio.Task[object]] = []  # the next step's microbatches, at stage 0

    def stop(self) -> None:
        """Finish what is in flight and return from `run`."""
        self._pipeline.prepare_to_leave()
        self.stopping.set()

    async def run(self) -> bool:
        """Train until the run is complete (True) or `stop` was called (False)."""
        if self._feed is None:
            return await self._train()
        self._feed.begin()
        try:
            return await self._train()
        finally:
            self._feed.stop()

    async def _train(self) -> bool:
        await self._end_round()  # a restart may have come between the last inner step of one and its end
        while not self.stopping.is_set() and not self._finished_here():
            began = asyncio.get_running_loop().time()
            draws: list[asyncio.Task[object]] = []
            try:
                await self._draw(draws)
                whole = await self._wait_for_batch(draws)
            except BaseException as reason:
                await cancelled([*draws, *self._drawn_ahead])
                if not (isinstance(reason, TransportDown) and self.stopping.is_set()):
                    raise
                logger.debug("Giving up the microbatches in flight: %s", reason)
                return False
            if whole:
                await self._step(began)
        is_complete = not self.stopping.is_set()
        if is_complete:
            self._pipeline.serving = False  # nobody would step any more
        await cancelled(self._drawn_ahead)
        await (self._last_round() if is_complete else self._pipeline.drain())
        return is_complete

    async def _draw(self, draws: list[asyncio.Task[object]]) -> None:
        """Stage 0: the microbatches of this inner step, started by now; with staleness the next step's too."""
        if self._feed is None:
            return
        step, inner = self._replica.step, self._context.manifest.inner
        draws += self._drawn_ahead or await self._draw_batch(self._feed, step)
        is_last = step + 1 >= inner.total_steps
        self._drawn_ahead = []
        if inner.staleness and not is_last:
            self._drawn_ahead = await self._draw_batch(self._feed, step + 1)

    async def _draw_batch(self, feed: Feed, step: int) -> list[asyncio.Task[object]]:
        tasks: list[asyncio.Task[object]] = []
        for index, batch in enumerate(await feed.take(self._context.manifest.inner.microbatches)):
            name = f"{step}-{index}-{self._life}"
            work = self._pipeline.draw(name, lambda batch=batch: batch)  # type: ignore[misc]
            tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks

    async def _wait_for_batch(self, draws: list[asyncio.Task[object]]) -> bool:
        """Whether a whole batch is in; False asks the caller to look again whether the run has ended."""
        loop = asyncio.get_running_loop()
        complete = loop.create_task(self._pipeline.batch_complete())
        stopping = loop.create_task(self.stopping.wait())
        pending = list(draws)
        try:
            while True:
                waiting = [complete, *pending] if draws else [complete, stopping]
                timeout = None if draws else IDLE_POLL_SECONDS
                await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for draw in [draw for draw in pending if draw.done()]:
                    pending.remove(draw)
                    draw.result()  # a failure here ends the node with its cause, it does not hang
                if complete.done():
                    return True
                if not draws and (stopping.done() or self._finished_here() or self._matchmaker.is_stale):
                    return await self._refreshed()
        finally:
            complete.cancel()
            stopping.cancel()

    async def _refreshed(self) -> bool:
        if self._matchmaker.is_stale:
            await self.download()
        return False

    async def _step(self, began: float) -> None:
        """One inner step with the batch that has been gathered since `began`."""
        context, replica = self._context, self._replica
        batch = context.manifest.inner.microbatches
        if self._feed is not None:
            self._feed.commit(replica.step + 1)
        report = await context.compute.run(Priority.OPTIMIZER, replica.inner_step, batch)
        context.counters.tokens_stepped = context.counters.tokens
        await self._healing.step_done(report)
        self._rounds.step_done(asyncio.get_running_loop().time() - began)
        await self._rounds.settle(wait=False)
        await self._end_round()
        if self._matchmaker.is_stale:
            await self.download()
        self._pipeline.next_step()
        context.counters.mark(asyncio.get_running_loop().time(), context.compute.busy.seconds())
        self._tell_feed()
        context.events.emit(
            "step",
            step=replica.step,
            loss=None if context.counters.loss is None else round(context.counters.loss, 6),
            gradient_norm=round(report.gradient_norm, 6),
            left_out=report.left_out or None,
            learning_rate=report.learning_rate,
            computed=round(context.compute.busy.seconds(), 3),
        )

    async def _end_round(self) -> None:
        """If it is at its end. Partners are offered, and take part in, nothing that is not finite."""
        if not (self._replica.steps_in_round and self._rounds.must_end) or not await self._healing.is_well():
            return
        if self._rounds.will_wait:
            self._pipeline.hold()
        await self._rounds.finish()
        await self._healing.is_well()

    def _tell_feed(self) -> None:
        if self._feed is not None and self._feed_report is not None:
            self._context.counters.data_wait = self._feed.waited()
            self._feed_report.tell()

    async def download(self) -> bool:
        """Take the stage's state from its other replicas. On failure, False, the own state stays as it is."""
        context, replica = self._context, self._replica
        self._matchmaker.is_stale = False

        def donors() -> list[str]:
            holding = context.view.holding(context.stage, context.transport.now())
            return [peer for peer in holding if peer != context.me]

        pieces: dict[int, list[torch.Tensor]] = {}  # half a download mixed with the own state is neither
        began = asyncio.get_running_loop().time()
        try:
            progress = await download_state(
                context.rpc,
                context.stage,
                replica.parameters,
                donors,  # type: ignore[arg-type]
                pieces.__setitem__,
            )
        except (JoinError, NolocoError) as failure:
            context.events.warn(f"{failure}", "download-failed")
            return False
        await self._rounds.abandon()
        await context.compute.run(Priority.OPTIMIZER, replica.adopt, pieces, progress.step, progress.round)
        seconds = asyncio.get_running_loop().time() - began
        context.events.say(
            f"Downloaded stage {context.stage} at step {progress.step} in {seconds:.1f} s.",
            "downloaded",
            step=progress.step,
            round=progress.round,
        )
        return True

    # --- the end ------------------------------------------------------------------------------

    def _finished_here(self) -> bool:
        """Stage 0 ends with its steps or its time; a later stage when all of the stage before have ended."""
        context = self._context
        if self._feed is not None:
            elapsed = asyncio.get_running_loop().time() - self._began
            out_of_time = bool(self._max_seconds) and elapsed >= self._max_seconds
            return out_of_time or self._replica.step >= context.manifest.inner.total_steps
        if self._pipeline.is_busy:
            return False
        before = context.view.members(context.stage - 1, context.transport.now())
        return bool(before) and all(member.announcement.state == "finished" for member in before)

    async def _last_round(self) -> None:
        """One more outer step, with a partner if one is found soon, so that θ and φ are one again."""
        await self._rounds.settle()
        if self._replica.steps_in_round and await self._healing.is_well():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_ROUND_SECONDS):
                    await self._rounds.seek_last()
            await self._rounds.finish(is_last=True)
        await self._matchmaker.retire()
