"""Finding the partner of a round: `Pairing` decides, this carries its proposals and answers over the network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any

from node.context import Context
from node.pairing import Meeting, Pair, Pairing, Phase
from node.replica import Replica
from protocol.errors import NolocoError, Refused
from protocol.messages import Accept, Done, Propose, Ready
from protocol.rpc import Answer, Request, Traffic

logger = logging.getLogger(__name__)

PROPOSAL_DEADLINE = 2.0
BUSY_SECONDS = 0.02  # before asking again: a handshake takes milliseconds
TIMED_STEPS = (
    9  # their median is the time of an inner step; the first one includes waiting for others to start
)
FRESH_ROUNDS = 2  # a replica this young that meets one FAR_AHEAD of it takes its state instead of averaging
FAR_AHEAD = 5


class Matchmaker:
    """Mutable state: the pairing, the search for a partner, the times of the last inner steps.

    `agreed` is called once for each pair, as soon as both know of it.
    """

    def __init__(
        self, context: Context, replica: Replica, rng: random.Random, agreed: Callable[[Pair], None]
    ) -> None:
        self._context = context
        self._replica = replica
        self._rng = rng
        self._agreed = agreed
        outer = context.manifest.outer
        self._pairing = Pairing(context.me, outer.inner_steps, outer.window, rng)
        self._seeking: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ending = False  # the round is at its end: no more proposals
        self._told = ""  # the pair whose partner knows that this round can end
        self._step_times: deque[float] = deque(maxlen=TIMED_STEPS)
        self.is_stale = False  # this replica is far behind the others: it should download its stage again
        self.accepting = True

    @property
    def pair(self) -> Pair | None:
        """The partner agreed on for this round."""
        return self._pairing.pair if self._pairing.phase is Phase.AGREED else None

    def is_expected(self, name: str, peer: str) -> bool:
        """Whether `peer` may send contributions under this pair's name."""
        pair = self._pairing.pair
        return pair is not None and pair.name == name and pair.partner == peer

    # --- during the inner steps ---------------------------------------------------------------

    def step_done(self, seconds: float) -> None:
        """An inner step ended after `seconds`: look for a partner, or tell it that this round can end."""
        self._step_times.append(seconds)
        steps = self._replica.steps_in_round
        if self._pairing.may_propose(steps) and not self._is_seeking:
            self._seeking = self._spawn(self._seek(whatever_the_step=False))
        pair = self.pair
        if pair is not None and self._told != pair.name and self._pairing.is_ready(steps):
            self._told = pair.name
            self._spawn(self._tell_ready(pair))

    @property
    def must_end(self) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        return self._pairing.must_end(self._replica.steps_in_round)

    async def seek_last(self) -> None:
        """Look for a partner for the last round of a run, whatever the step count, until there is one."""
        if self._pairing.phase is Phase.FREE and not self._is_seeking:
            self._seeking = self._spawn(self._seek(whatever_the_step=True))
        if self._seeking is not None:
            await asyncio.wait([self._seeking])
        if self._pairing.pair is not None and self._told != self._pairing.pair.name:
            await self._tell_ready(self._pairing.pair)

    async def conclude(self) -> Pair | None:
        """The round is at its end: stop looking, and return the partner if there is one."""
        self._ending = True
        if self._seeking is not None and not self._seeking.done():
            await asyncio.wait([self._seeking], timeout=PROPOSAL_DEADLINE)
            self._seeking.cancel()
        return self.pair

    def begin_round(self) -> None:
        self._ending = False
        self._pairing.begin_round()

    @property
    def _is_seeking(self) -> bool:
        return self._seeking is not None and not self._seeking.done()

    async def _seek(self, whatever_the_step: bool) -> None:
        """Propose to random replicas until one agrees or all have refused."""
        context = self._context
        while self._pairing.phase is Phase.FREE and not self._ending:
            candidates = context.view.serving(context.stage, context.transport.now())
            pair = self._pairing.propose(candidates)
            if pair is None:
                if not whatever_the_step:
                    return
                self._pairing.forget_refusals()
                await asyncio.sleep(BUSY_SECONDS)
                continue
            refusal = await self._ask(pair, whatever_the_step)
            self._pairing.answered(pair, refusal)
            if self.pair == pair:
                self._agreed(pair)
            if refusal == "busy":
                await asyncio.sleep(BUSY_SECONDS * self._rng.uniform(0.5, 1.5))

    async def _ask(self, pair: Pair, at_once: bool) -> str | None:
        """Propose; the code of the refusal, None when the other agreed."""
        context = self._context
        meeting = self._meeting()
        proposal = Propose(
            stage=context.stage,
            round=self._replica.round,
            pair=pair.name,
            opens_in=0.0 if at_once else meeting.opens_in,
            ends_in=meeting.ends_in,
        )
        try:
            await context.rpc.call(pair.partner, Traffic.GOSSIP, proposal, Accept, deadline=PROPOSAL_DEADLINE)
        except Refused as refusal:
            self.is_stale = self.is_stale or refusal.code == "stale"
            return refusal.code
        except NolocoError as failure:
            logger.debug("Proposal to %s failed: %s", pair.partner[-8:], failure)
            context.view.suspect(pair.partner, context.transport.now())
            return "lost"
        return None

    async def _tell_ready(self, pair: Pair) -> None:
        """Losing this costs the partner a few more inner steps, nothing else."""
        with contextlib.suppress(NolocoError):
            await self._context.rpc.call(
                pair.partner, Traffic.GOSSIP, Ready(pair=pair.name), Done, deadline=PROPOSAL_DEADLINE
            )

    def _meeting(self) -> Meeting:
        return self._pairing.meeting(self._replica.steps_in_round, self._step_seconds)

    @property
    def _step_seconds(self) -> float:
        return median(self._step_times) if self._step_times else 0.0

    # --- what others ask ----------------------------------------------------------------------

    async def on_ready(self, request: Request) -> Answer:
        pair = self._pairing.pair
        if pair is None or pair.partner != request.peer or not self._pairing.on_ready(request.message.pair):
            raise Refused("unknown-pair")
        return Answer(Done())

    async def on_propose(self, request: Request) -> Answer:
        message: Propose = request.message
        if message.stage != self._context.stage or not self.accepting:
            raise Refused("other-stage" if self.accepting else "finished")
        mine, theirs = self._replica.round, message.round
        if theirs <= FRESH_ROUNDS and mine - theirs >= FAR_AHEAD:
            raise Refused("stale", "download this stage's state first")
        if mine <= FRESH_ROUNDS and theirs - mine >= FAR_AHEAD:
            self.is_stale = True
            raise Refused("early")
        if not self._step_times:
            raise Refused("early")
        if self._ending and self.pair is None:
            raise Refused("busy")  # an agreement now would be forgotten when the next round begins
        pair = Pair(request.peer, message.pair)
        meeting = Meeting(message.opens_in, message.ends_in)
        refusal = self._pairing.on_proposal(pair, meeting, self._replica.steps_in_round, self._step_seconds)
        if refusal is not None:
            raise Refused(refusal)
        self._agreed(pair)
        return Answer(Accept(round=self._replica.round))

    # --- the end ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def close(self) -> None:
        self.accepting = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
