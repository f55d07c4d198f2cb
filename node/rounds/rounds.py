"""Rounds: exchange contributions with the partner that the matchmaker found, take the outer step.

When that happens is the manifest's `outer.overlap`: at the end of the round ("none"; "phi-early" with φ sent long
before), or while the next round has begun ("late").
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import torch

from node.context import Context
from node.model.compute import Priority
from node.model.replica import Replica
from node.rounds.all_reduce import AllReduce
from node.rounds.averaging import Pull
from node.rounds.exchange import Exchange
from node.rounds.matchmaker import Matchmaker
from node.rounds.outgoing_update import sampled
from node.rounds.pair_exchange import PairExchange
from node.rounds.pairing import Pair
from node.rounds.round_statistics import MeetingSample, RoundStatistics
from node.watch.trace import Track
from protocol.errors import CodecError, OutOfMemory, Refused
from protocol.messages import Contribute, Done
from protocol.rpc import Answer, Request
from protocol.supervision import cancelled
from protocol.transport.base import PeerId


@dataclass
class Pending:
    """A round whose exchange goes on while the next one trains."""

    swap: PairExchange
    exchange: asyncio.Task[bool]
    blocked_seconds: float  # so far


class Rounds:
    """Mutable state: the search for a partner, the exchanges, a round whose step is due, the spread as known."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._exchange = Exchange(context, replica)
        self._judgement = RoundStatistics(context, replica)
        self._is_late = context.manifest.outer.overlap == "late"
        self._pending: Pending | None = None
        self._is_over = False  # the matchmaker is still with the round that has ended
        self._left: torch.Tensor | None = None  # memory of `leave_round`, to be used again
        self._outer = context.manifest.outer
        self._round_began = context.trace.now()
        self.all_reduce = AllReduce(context, replica)  # of the method "diloco"
        self.matchmaker = Matchmaker(
            context,
            replica,
            rng,
            agreed=self._begin,
            avoid=self._judgement.is_quarantined,
        )
        self.matchmaker.accepting = self._outer.averages_pairs

    @property
    def must_end(self) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        if self._is_over or not self._outer.averages_pairs:
            return self._replica.steps_in_round >= self._outer.inner_steps
        return self.matchmaker.must_end

    def step_done(self, seconds: float) -> None:
        """An inner step ended after `seconds`."""
        if self._outer.averages_pairs:
            self.matchmaker.step_done(seconds)

    async def seek_last(self) -> None:
        """Look for a partner for the last round of a run until there is one."""
        if self._outer.averages_pairs:
            await self.matchmaker.seek_last()

    @property
    def has_partner(self) -> bool:
        return self.matchmaker.pair is not None

    @property
    def will_wait(self) -> bool:
        """Whether `finish` has to wait for another peer."""
        if self._outer.method == "diloco":
            return True
        return self._pending is not None or (self.has_partner and not self._is_late)

    async def finish(self, is_last: bool = False) -> None:
        """Exchange with the agreed partner, if any, and take the outer step with what is there.

        Always leaves a valid update behind: unless both contributions arrive whole before the deadline, the
        group is this replica alone. With the overlap "late" the step is left to `settle`, but not that of the
        last round of a run nor that of a round without a partner.
        """
        with self._context.trace.span(Track.ROUND_END, "end of the round"):
            await self._end_round(is_last)

    async def _end_round(self, is_last: bool) -> None:
        await self.settle()
        began = asyncio.get_running_loop().time()
        if self._outer.method == "diloco":
            await self._average_with_all(began)
            return
        pair = await self.matchmaker.conclude()
        swap = None if pair is None else self._exchange.of(pair)
        if swap is None or swap.is_over:
            await self._take_step(None, False, began)
        elif self._is_late and not is_last:
            await self._leave(swap, began)
        else:
            with self._context.trace.span(
                Track.ROUND_END, "wait for the partner", partner=swap.pair.partner[-8:]
            ):
                averaged = await self._exchange.finish(swap, urgent=True)
            await self._take_step(swap, averaged, began)
        self._is_over = True
        self._begin_next()

    async def settle(self, wait: bool = True) -> None:
        """Take the step of the round before, if it is due; without `wait` only if there is nothing to wait for."""
        pending, began = self._pending, asyncio.get_running_loop().time()
        if pending is not None and (wait or pending.exchange.done()):
            pending.swap.urgent.set()
            partner = pending.swap.pair.partner
            with self._context.trace.span(Track.ROUND_END, "wait for the partner", partner=partner[-8:]):
                averaged = await pending.exchange
            self._pending = None
            await self._take_step(pending.swap, averaged, began, pending)
        self._begin_next()

    def _begin_next(self) -> None:
        """Have the next round's partner found, as soon as that of the last round needs no answers any more.

        Until its contribution comes, it may ask whether it is still waited for.
        """
        swap = self._pending.swap if self._pending is not None else None
        if self._is_over and (swap is None or not swap.partners.is_empty or swap.is_over):
            self._is_over = False
            self.matchmaker.begin_round()
            self._exchange.drop_unless(self._is_wanted)

    async def abandon(self) -> None:
        """The replica's state is about to be replaced: drop everything that was made from the old one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            await cancelled([pending.exchange])
        self._exchange.end_all()
        await self._exchange.still()
        await self.matchmaker.let_go()
        self._begin_next()

    async def on_contribute(self, request: Request) -> Answer:
        message: Contribute = request.message
        pair = Pair(request.peer, message.pair)
        if not self._exchange.has_averaged(pair):
            if not (self._exchange.knows(pair) or self.matchmaker.is_expected(pair.name, pair.partner)):
                raise Refused("unknown-pair")
            try:
                self._exchange.receive(self._exchange.of(pair), message, request.encoded())
            except CodecError:
                self._judgement.refused(request.peer)
                raise
        return Answer(Done())

    def _begin(self, pair: Pair) -> None:
        """The pair of this round is agreed on, perhaps in place of one that came to nothing."""
        self._exchange.drop_unless(self._is_wanted)
        self._exchange.begin(pair)

    # --- the outer step -----------------------------------------------------------------------

    async def _leave(self, swap: PairExchange, began: float) -> None:
        """Let the exchange go on by itself while the next round trains."""
        try:
            await self._context.compute.run(Priority.OPTIMIZER, self._work_leave_round, swap)
        except (CodecError, OutOfMemory):
            await self._take_step(None, False, began)
            return
        exchange = self._context.supervisor.start(
            self._exchange.finish(swap, urgent=False), "averaging with the partner"
        )
        self._pending = Pending(swap, exchange, asyncio.get_running_loop().time() - began)

    def _work_leave_round(self, swap: PairExchange) -> None:
        swap.offer.encode_ahead("z")
        if self._left is None:
            self._left = torch.empty_like(self._replica.phi)
        self._replica.leave_round(self._left)

    async def _take_step(
        self, swap: PairExchange | None, averaged: bool, began: float, pending: Pending | None = None
    ) -> None:
        context = self._context
        await self._exchange.still()
        seen = await context.compute.run(
            Priority.OPTIMIZER, self._work_outer_step, swap if averaged else None
        )
        self._judgement.round_ended(swap.pair.partner if swap is not None and averaged else None, seen)
        blocked = asyncio.get_running_loop().time() - began + (pending.blocked_seconds if pending else 0.0)
        self._record(swap, averaged, blocked)
        if swap is not None:
            self._exchange.forget(swap, averaged)

    def _work_outer_step(self, swap: PairExchange | None) -> MeetingSample | None:
        """With what the partner gave, or alone. Returns what the meeting told, if there was one."""
        replica = self._replica
        if swap is None:
            replica.finish_round_alone()
            return None
        pull, phi = Pull(swap.offer, swap.partners, replica.device), sampled(replica.phi).clone()
        finding = self._judgement.defend(swap.pair.partner, pull)
        swap.offer.owe_rest()
        replica.finish_round_with(pull.piece)
        return self._judgement.seen(pull.sample, phi, swap.phi_sample, finding)

    async def _average_with_all(self, began: float) -> None:
        context, replica, sent_before = self._context, self._replica, self.all_reduce.bytes_sent
        try:
            z = await context.compute.run(Priority.OPTIMIZER, replica.contribution)
        except OutOfMemory:
            context.events.warn(
                "There is no memory to average with the others; it counts its own progress alone. Close other "
                "programs, or give this node more with --max-memory.",
                "all-reduce-alone",
                reason="out of memory",
            )
            await context.compute.run(Priority.OPTIMIZER, replica.finish_round_alone)
        else:
            with context.trace.span(Track.ROUND_END, "wait for all replicas"):
                mean = await self.all_reduce.mean(z)
            await context.compute.run(Priority.OPTIMIZER, replica.finish_round, mean)
        sent = self.all_reduce.bytes_sent - sent_before
        context.counters.gossip_bytes += sent
        self._tell(None, asyncio.get_running_loop().time() - began, sent)

    # --- what others see ----------------------------------------------------------------------

    def _record(self, swap: PairExchange | None, averaged: bool, blocked_seconds: float) -> None:
        context = self._context
        partner = swap.pair.partner if swap is not None and averaged else None
        context.counters.partner = partner or ""
        if partner is not None:
            context.view.trust(partner)
            self.matchmaker.standing.met()
            context.counters.partners.note(partner)
        self._tell(partner, blocked_seconds, swap.bytes_sent if swap is not None else 0)

    def _tell(self, partner: PeerId | None, blocked_seconds: float, gossip_bytes: int) -> None:
        counters, trace = self._context.counters, self._context.trace
        counters.blocked_seconds += blocked_seconds
        began, self._round_began = self._round_began, trace.now()
        trace.complete(
            Track.ROUNDS,
            f"round {self._replica.round}",
            began,
            self._round_began,
            partner=partner[-8:] if partner else "alone",
            gossip_bytes=gossip_bytes,
            blocked_ms=round(blocked_seconds * 1e3, 3),
        )
        self._context.events.emit(
            "round",
            round=self._replica.round,
            step=self._replica.step,
            partner=partner,
            blocked_seconds=round(blocked_seconds, 6),
            gossip_bytes=gossip_bytes,
            spread=counters.spread,
            expected_spread=counters.expected_spread,
        )

    def _is_wanted(self, pair: Pair) -> bool:
        is_pending = self._pending is not None and self._pending.swap.pair == pair
        return is_pending or self.matchmaker.is_expected(pair.name, pair.partner)

    async def close(self) -> None:
        self.all_reduce.close()
        await self.abandon()
        await self.matchmaker.close()
