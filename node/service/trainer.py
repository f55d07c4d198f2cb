"""Sets the replica's own rhythm: a batch, an inner step, and every k of them a round."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from node.context import Context
from node.model.compute import Priority
from node.model.replica import Replica
from node.pipeline.pipeline import Pipeline
from node.pipeline.source import MicrobatchSource
from node.rounds.kin import Kin
from node.rounds.rounds import Rounds
from node.state.checkpoints import Checkpoints
from node.state.download import WantedState, download_state
from node.state.healing import Healing
from protocol.errors import NolocoError, TransportDown
from protocol.ground import PeerId
from protocol.records.announcement import State
from protocol.records.lineage import Lineage
from protocol.supervision import cancelled
from protocol.windows import window

logger = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.25
BUSY_POLL_SECONDS = 5.0  # while own microbatches are under way
LOOK_SECONDS = 5.0  # between two looks whether the weights are finite, when microbatches turn out as NaN
LAST_ROUND_SECONDS = 3.0  # a replica that has finished looks this long for a partner for its last round
CLOSING_ROUNDS = 3  # after that one: each takes half of the square distance to the stage's mean away
CLOSING_SECONDS = 1.0  # and this long for a partner in each; longer for those that still train:
WAITED = 0.05  # of the time that this replica trained,
LONGEST_WAIT = 600.0  # but no longer than this, in seconds
LEAST_HUNGER = 30.0  # seconds, and as long as above, in which nothing counts while neighbours have finished


class Trainer:
    """Runs the inner steps of this replica, and a round every k of them."""

    def __init__(
        self,
        context: Context,
        replica: Replica,
        pipeline: Pipeline,
        rounds: Rounds,
        checkpoints: Checkpoints,
        source: MicrobatchSource | None,
    ) -> None:
        """`source` is given on stage 0 alone."""
        self._context = context
        self._replica = replica
        self._pipeline = pipeline
        self._rounds = rounds
        self._kin = Kin(context, replica)
        self._checkpoints = checkpoints
        self._healing = Healing(context, replica, checkpoints, rounds.abandon, self.download)
        self._source = source
        self._tasks = context.supervisor.group()
        self.stopping = asyncio.Event()  # set by `stop`
        self.downloading = ""  # how far a download is
        self._began = 0.0  # to train

    @window
    def __repr__(self) -> str:
        doing = "stopping" if self.stopping.is_set() else self.downloading or "training"
        at = f"{self._replica.step} | Source: {'no' if self._source is None else 'yes'}"
        return f"Stage: {self._context.stage} | {doing} | Step: {at} | Tasks: {self._tasks.running()}"

    def stop(self) -> None:
        """Finish what is in flight and return from `run`."""
        self._pipeline.prepare_to_leave()
        self.stopping.set()

    async def run(self) -> bool:
        """Train until the run is complete (True) or `stop` was called (False)."""
        if self._source is None:
            return await self._train()
        self._source.begin()
        try:
            return await self._train()
        finally:
            await self._tasks.close()
            await self._source.close()

    async def _train(self) -> bool:
        self._began = asyncio.get_running_loop().time()
        await self._end_round()  # a restart may have come between the last inner step of one and its end
        while not self.stopping.is_set() and not self._finished_here():
            began = asyncio.get_running_loop().time()
            tasks: list[asyncio.Task[None]] = []
            try:
                if self._source is not None:
                    tasks = await self._source.start_step(self._replica.step)
                whole = await self._wait_for_batch(tasks)
            except BaseException as reason:
                await cancelled(tasks)
                await self._cancel_ahead()
                if not (isinstance(reason, TransportDown) and self.stopping.is_set()):
                    raise
                logger.debug("Giving up the microbatches in flight: %s", reason)
                return False
            if whole:
                await self._step(began)
        is_complete = not self.stopping.is_set()
        if is_complete:
            self._pipeline.serving = False  # nobody would step any more
        await self._cancel_ahead()
        await (self._last_rounds() if is_complete else self._pipeline.drain())
        return is_complete

    async def _cancel_ahead(self) -> None:
        if self._source is not None:
            await self._source.cancel_ahead()

    async def _wait_for_batch(self, microbatches: list[asyncio.Task[None]]) -> bool:
        """Wait until a whole batch is in; False asks the caller to look again whether the run has ended."""
        complete = self._tasks.start(self._pipeline.batch_complete())
        stopping = self._tasks.start(self.stopping.wait())
        doubt = self._tasks.start(self._in_doubt())
        pending = list(microbatches)
        try:
            while True:
                waiting = [complete, doubt, *pending] if microbatches else [complete, doubt, stopping]
                timeout = BUSY_POLL_SECONDS if microbatches else IDLE_POLL_SECONDS
                await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task.done()]:
                    pending.remove(task)
                    task.result()  # a failure here ends the node with its cause, it does not hang
                if complete.done():
                    return True
                if doubt.done():
                    await self._healing.is_well()
                    doubt = self._tasks.start(self._in_doubt())
                if microbatches:
                    if self._nobody_takes_more():
                        await cancelled(pending)
                        return False
                elif stopping.done() or self._finished_here() or self._rounds.behind or self._kin.older:
                    await self._catch_up()
                    return False
        finally:
            await cancelled([complete, stopping, doubt])

    async def _in_doubt(self) -> None:
        """Return when the weights may be NaN, but not soon after they were looked at for that."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, self._healing.looked_at + LOOK_SECONDS - now))
        await self._pipeline.doubt.wait()
        self._pipeline.doubt.clear()

    async def _catch_up(self) -> None:
        """Take the others' state when this replica missed what they did, or theirs is the stage's older history."""
        await self._kin.ask()
        if (older := self._kin.older) is not None:
            self._context.events.say(
                f"Stage {self._context.stage} has its earlier state back: others have it from before this node's "
                "was begun. This node downloads theirs.",
                "yielded",
                stage=self._context.stage,
                beginning=older.beginning,
            )
            if not await self.download(older):
                self._kin.leave_alone()
            return
        reason = self._rounds.behind
        if reason:
            self._context.events.say(
                f"This node is behind its stage: {reason}. It downloads their state.", "behind", reason=reason
            )
            await self.download()

    async def _step(self, began: float) -> None:
        """Take one inner step with the batch that has been gathered since `began`."""
        context, replica = self._context, self._replica
        batch = context.manifest.inner.microbatches
        if self._source is not None:
            self._source.commit(replica.step + 1)
        report = await context.compute.run(Priority.OPTIMIZER, replica.inner_step, batch)
        context.counters.tokens_stepped = context.counters.tokens
        await self._healing.step_done(report)
        self._rounds.step_done(asyncio.get_running_loop().time() - began)
        await self._end_round()
        await self._catch_up()
        self._pipeline.next_step()
        self._checkpoints.step_done()
        context.events.phases.end()
        context.throughput.mark(asyncio.get_running_loop().time(), context.compute.busy.seconds())
        if self._source is not None:
            self._source.tell()
        context.events.emit(
            "step",
            step=replica.step,
            loss=None if context.counters.loss is None else round(context.counters.loss, 6),
            gradient_norm=round(report.gradient_norm, 6),
            left_out=report.left_out or None,
            learning_rate=report.learning_rate,
            computed=round(context.compute.busy.seconds(), 3),
        )

    async def step_with_what_is_in(self) -> None:
        """Take an inner step with less than a batch, once nothing runs any more, so that no gradient is lost.

        Not at the first stage: it draws its whole batch again.
        """
        gradients = self._pipeline.gradients_in
        if gradients and self._source is None:
            await self._context.compute.run(Priority.OPTIMIZER, self._replica.inner_step, gradients)
            self._context.counters.tokens_stepped = self._context.counters.tokens

    async def _end_round(self) -> None:
        """End the round if it is at its end. Partners are offered, and take part in, nothing that is not finite."""
        if not (self._replica.steps_in_round and self._rounds.must_end) or not await self._healing.is_well():
            return
        if self._rounds.will_wait:
            self._pipeline.hold()
        await self._rounds.finish()
        await self._healing.is_well()

    def began_alone(self) -> None:
        """Note that the first state is the seed's or a saved one, and nobody seen could have given another."""
        self._rounds.began_alone()

    def note_download(self, fraction: float) -> None:
        self.downloading = f"{fraction:.0%} of it is here"

    async def download(self, lineage: Lineage | None = None) -> bool:
        """Take the stage's state from its other replicas of a lineage, by default of this one's.

        On failure, False, the own state stays as it is.
        """
        context, replica, rng = self._context, self._replica, self._context.random()
        clock, of = asyncio.get_running_loop().time, lineage or replica.lineage

        def holders() -> list[PeerId]:
            return context.view.thinned(list(self._kin.holders(of)), rng)

        wanted = WantedState.of(context.manifest, context.stage, replica.parameters)
        began = clock()
        self._rounds.download_began()
        try:
            pieces, progress = await download_state(context.rpc, wanted, holders, rng, self.note_download)
        except NolocoError as failure:
            self._rounds.download_ended(False)
            context.events.warn(f"{failure}", "download-failed")
            return False
        await self._rounds.abandon()
        for told in self._kin.holders(of).values():
            of = of.joined(told)
        adopt = partial(replica.adopt, pieces, progress.step, progress.round, of)
        await context.compute.run(Priority.OPTIMIZER, adopt)
        self._rounds.download_ended(True)
        seconds = clock() - began
        context.events.say(
            f"Downloaded stage {context.stage} at step {progress.step} in {seconds:.1f} s.",
            "downloaded",
            step=progress.step,
            round=progress.round,
        )
        return True

    # --- the end ------------------------------------------------------------------------------

    def _finished_here(self) -> bool:
        """Return whether the run ends here: stage 0 by its steps or time, others once the stage before has ended.

        Nobody's word alone keeps a stage or ends it: it has also ended when nothing has counted for long, and most of
        the one before have finished or all of the next one.
        """
        if self._source is not None:
            is_done = self._replica.step >= self._context.manifest.inner.total_steps
            return self._source.out_of_time or is_done or self._nobody_takes_more()
        before = self._states_of(self._context.stage - 1)
        finished = before.count("finished")
        if before and finished == len(before) and not self._pipeline.is_busy:
            return True
        context = self._context
        most_finished = context.view.most_have_finished(context.stage - 1, context.transport.now())
        return (most_finished and self._is_hungry()) or self._nobody_takes_more()

    def _nobody_takes_more(self) -> bool:
        after = [] if self._context.is_last else self._states_of(self._context.stage + 1)
        return bool(after) and after.count("finished") == len(after) and self._is_hungry()

    def _states_of(self, stage: int) -> list[State]:
        members = self._context.view.members(stage, self._context.transport.now())
        return [member.announcement.state for member in members]

    def _is_hungry(self) -> bool:
        now = asyncio.get_running_loop().time()
        patience = min(LONGEST_WAIT, WAITED * (now - self._began))
        return now - max(self._began, self._pipeline.fed) > max(LEAST_HUNGER, patience)

    async def _last_rounds(self) -> None:
        """Take one more outer step, with a partner if one is found soon, so that θ and φ are one again.

        Then come closing rounds, in which nothing is trained, as long as there are partners: what is exported of this
        replica alone is then nearly the mean of the stage.
        """
        if await self._healing.is_well():
            if self._replica.steps_in_round:
                await self._found_last_partner(LAST_ROUND_SECONDS)
                await self._rounds.finish()
            await self._close()
            # what no closing round has averaged
            await self._context.compute.run(Priority.OPTIMIZER, self._replica.settle)
        await self._rounds.retire()

    async def _close(self) -> None:
        """Take rounds with those that have finished, and before with those that have not, which would be alone."""
        clock = asyncio.get_running_loop().time
        out_of_time = self._source is not None and self._source.out_of_time
        until = clock() + (0.0 if out_of_time else min(LONGEST_WAIT, WAITED * (clock() - self._began)))
        closing = 0
        while closing < CLOSING_ROUNDS and not self.stopping.is_set():
            if not await self._found_last_partner(CLOSING_SECONDS):
                if clock() < until and self._rounds.may_meet_others:
                    continue
                return
            closing += not self._rounds.partner_trains or clock() >= until
            await self._context.compute.run(Priority.OPTIMIZER, self._replica.stop_momentum)
            await self._rounds.finish()

    async def _found_last_partner(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._rounds.seek_last()
        except TimeoutError:
            return False
