"""Rounds: find one partner among the replicas of the own stage, exchange z with it, take the outer step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Coroutine
from statistics import median
from typing import Any

import torch

from node.compute import Priority
from node.context import Context
from node.exchange import Exchange, Received
from node.pairing import Meeting, Pair, Pairing, Phase
from node.replica import Replica
from node.spread import SpreadEstimate
from protocol.errors import NolocoError, Refused
from protocol.messages import Accept, Contribute, Done, Propose, Ready
from protocol.rpc import Answer, Request, Traffic

logger = logging.getLogger(__name__)

PROPOSAL_DEADLINE = 2.0
BUSY_SECONDS = 0.02  # before asking again: a handshake takes milliseconds
TIMED_STEPS = (
    9  # their median is the time of an inner step; the first one includes waiting for others to start
)
FRESH_ROUNDS = 2  # a replica this young that meets one FAR_AHEAD of it takes its state instead of averaging
FAR_AHEAD = 5


class Rounds:
    """Mutable state: the pairing and the exchange, the search for a partner, the spread as it is known."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._rng = rng
        outer = context.manifest.outer
        self.pairing = Pairing(context.me, outer.inner_steps, outer.window, rng)
        self._exchange = Exchange(context, replica)
        self._spread = SpreadEstimate()
        self._seeking: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ending = False  # the round is at its end: no more proposals
        self._told = ""  # the pair whose partner knows that this round can end
        self._step_times: deque[float] = deque(maxlen=TIMED_STEPS)
        self.is_stale = False  # this replica is far behind the others: it should download its stage again
        self.accepting = True

    # --- during the inner steps ---------------------------------------------------------------

    def step_done(self, seconds: float) -> None:
        """An inner step ended after `seconds`: look for a partner, or tell it that this round can end."""
        self._step_times.append(seconds)
        steps = self._replica.steps_in_round
        if self.pairing.may_propose(steps) and not self._is_seeking:
            self._seeking = self._spawn(self._seek(whatever_the_step=False))
        pair = self.pairing.pair
        if pair is not None and self._told != pair.name and self.pairing.is_ready(steps):
            self._told = pair.name
            self._spawn(self._tell_ready(pair))

    @property
    def must_end(self) -> bool:
        return self.pairing.must_end(self._replica.steps_in_round)

    @property
    def has_partner(self) -> bool:
        return self.pairing.phase is Phase.AGREED

    async def seek_last(self) -> None:
        """Look for a partner for the last round of a run, whatever the step count, until there is one."""
        if self.pairing.phase is Phase.FREE and not self._is_seeking:
            self._seeking = self._spawn(self._seek(whatever_the_step=True))
        if self._seeking is not None:
            await asyncio.wait([self._seeking])
        if self.pairing.pair is not None and self._told != self.pairing.pair.name:
            await self._tell_ready(self.pairing.pair)

    @property
    def _is_seeking(self) -> bool:
        return self._seeking is not None and not self._seeking.done()

    async def _seek(self, whatever_the_step: bool) -> None:
        """Propose to random replicas until one agrees or all have refused."""
        context = self._context
        while self.pairing.phase is Phase.FREE and not self._ending:
            candidates = context.view.serving(context.stage, context.transport.now())
            pair = self.pairing.propose(candidates)
            if pair is None:
                if not whatever_the_step:
                    return
                self.pairing.forget_refusals()
                await asyncio.sleep(BUSY_SECONDS)
                continue
            self._exchange.expect(pair.name)
            refusal = await self._ask(pair, whatever_the_step)
            self.pairing.answered(pair, refusal)
            if self.pairing.pair != pair:
                self._exchange.forget(pair.name)
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
        return self.pairing.meeting(self._replica.steps_in_round, self._step_seconds)

    @property
    def _step_seconds(self) -> float:
        return median(self._step_times) if self._step_times else 0.0

    async def on_ready(self, request: Request) -> Answer:
        pair = self.pairing.pair
        if pair is None or pair.partner != request.peer or not self.pairing.on_ready(request.message.pair):
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
        if self._ending and not self.has_partner:
            raise Refused("busy")  # an agreement now would be forgotten when the next round begins
        pair = Pair(request.peer, message.pair)
        meeting = Meeting(message.opens_in, message.ends_in)
        refusal = self.pairing.on_proposal(pair, meeting, self._replica.steps_in_round, self._step_seconds)
        if refusal is not None:
            raise Refused(refusal)
        self._exchange.expect(pair.name)
        return Answer(Accept(round=self._replica.round))

    # --- at the end of a round ----------------------------------------------------------------

    async def finish(self) -> None:
        """Exchange with the agreed partner, if any, and take the outer step with what is there.

        Always leaves a valid update behind: without a whole contribution from the partner before the
        deadline, the group is this replica alone.
        """
        context, replica = self._context, self._replica
        began = asyncio.get_running_loop().time()
        self._ending = True
        if self._seeking is not None and not self._seeking.done():
            await asyncio.wait([self._seeking], timeout=PROPOSAL_DEADLINE)
            self._seeking.cancel()
        pair = self.pairing.pair if self.pairing.phase is Phase.AGREED else None
        z = await context.compute.run(Priority.OPTIMIZER, replica.contribution)
        received = await self._exchange.swap(pair, z) if pair is not None else None
        if received is not None and received.phi_sample is not None:
            self._note_distance(received.phi_sample)
        await context.compute.run(Priority.OPTIMIZER, self._work_finish, z, received)
        self._record(pair if received is not None else None, asyncio.get_running_loop().time() - began)
        self._exchange.forget_all()
        self._ending = False
        self.pairing.begin_round()

    def _work_finish(self, z: torch.Tensor, received: Received | None) -> None:
        mean = z if received is None else (self._exchange.as_sent(z) + received.z).div_(2)
        self._replica.finish_round(mean)

    async def on_contribute(self, request: Request) -> Answer:
        message: Contribute = request.message
        pair = self.pairing.pair
        if pair is None or pair.name != message.pair or pair.partner != request.peer:
            raise Refused("unknown-pair")
        if not self._exchange.expects(message.pair):
            raise Refused("unknown-pair")
        self._exchange.receive(message, request.tensors())
        return Answer(Done())

    # --- bookkeeping --------------------------------------------------------------------------

    def _note_distance(self, phi_sample: torch.Tensor) -> None:
        """The mean squared difference of two random replicas estimates their spread."""
        context = self._context
        self._spread.note(self._exchange.phi_sample(), phi_sample)
        replicas = len(context.view.members(context.stage, context.transport.now()))
        context.counters.spread = self._spread.value(replicas)

    def _record(self, pair: Pair | None, seconds: float) -> None:
        context = self._context
        context.counters.blocked_seconds += seconds
        context.counters.partner = pair.partner if pair else ""
        if pair is not None:
            context.view.trust(pair.partner)
            context.counters.partners[pair.partner] = context.counters.partners.get(pair.partner, 0) + 1
        context.events.emit(
            "round",
            round=self._replica.round,
            step=self._replica.step,
            partner=pair.partner if pair else None,
            seconds=round(seconds, 6),
            spread=context.counters.spread,
        )

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
