"""Rounds: exchange contributions with the partner that the matchmaker found, take the outer step.

That happens at the end of the round; with `outer.overlap` "phi-early" φ has been sent long before.
"""

from __future__ import annotations

import asyncio
import random

from node.context import Context
from node.model.compute import Priority
from node.model.replica import Replica
from node.model.resources import named
from node.rounds.all_reduce import AllReduce
from node.rounds.contribution import sampled
from node.rounds.exchange import Exchange, PairExchange
from node.rounds.matchmaker import Matchmaker
from node.rounds.meeting import Pair
from node.rounds.pull import Pull
from node.rounds.round_statistics import MeetingSample, RoundStatistics
from node.watch.trace import Track
from protocol.errors import CodecError, OutOfMemory, Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.training import Contribute, Unread
from protocol.rpc import Answer, Request, Rpc


class Rounds:
    """Ends rounds: finds the partner, exchanges contributions, takes the outer step.

    Mutable state: the search for a partner, the exchanges, the spread as known.
    """

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._exchange = Exchange(context, replica)
        self._judgement = RoundStatistics(context, replica)
        self._outer = context.manifest.outer
        self._round_began = context.trace.now()
        self.all_reduce = AllReduce(context, replica)  # of the method "diloco"
        self.matchmaker = Matchmaker(
            context, replica, rng, agreed=self._begin, avoid=self._judgement.is_quarantined
        )
        self.matchmaker.accepting = self._outer.averages_pairs

    @property
    def must_end(self) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        if not self._outer.averages_pairs:
            return self._replica.steps_in_round >= self._outer.inner_steps
        return self.matchmaker.must_end

    def step_done(self, seconds: float) -> None:
        if self._outer.averages_pairs:
            self.matchmaker.step_done(seconds)

    async def seek_last(self) -> bool:
        """Look for a partner for a round after the last inner step of a run, until there is one for it or the next.

        False where rounds are not of pairs.
        """
        if self._outer.averages_pairs:
            await self.matchmaker.seek_last()
        return self.matchmaker.has_agreed

    @property
    def may_meet_others(self) -> bool:
        """Whether `seek_last` waits for a partner, and there are replicas that may yet be one."""
        return self.matchmaker.accepting and self.matchmaker.others_serve

    @property
    def partner_trains(self) -> bool:
        """Whether the partner of this round takes inner steps still, as far as it has said."""
        return self.matchmaker.partner_trains

    @property
    def has_partner(self) -> bool:
        return self.matchmaker.pair is not None

    @property
    def will_wait(self) -> bool:
        """Whether `finish` has to wait for another peer."""
        return self._outer.method == "diloco" or self.has_partner

    # --- belonging to the stage ---------------------------------------------------------------

    @property
    def behind(self) -> str:
        """Why this replica should download its stage before it averages; empty when it belongs."""
        return self.matchmaker.behind

    def began_alone(self) -> None:
        """Its first state is the seed's or a saved one, and it saw nobody who could have given another."""
        self.matchmaker.standing.began_alone()

    def download_began(self) -> None:
        self.matchmaker.behind = ""

    def download_ended(self, succeeded: bool) -> None:
        """A download has ended. With success the replica belongs from there on; without, training goes on with what
        there is, for a while.
        """
        if succeeded:
            self.matchmaker.standing.downloaded()
        else:
            self.matchmaker.standing.download_failed(asyncio.get_running_loop().time())

    async def retire(self) -> None:
        await self.matchmaker.retire()

    # --- the end of a round -------------------------------------------------------------------

    async def finish(self) -> None:
        """Exchange with the agreed partner, if any, and take the outer step with what is there.

        Always leaves a valid update behind: unless both contributions arrive whole before the deadline, the
        group is this replica alone.
        """
        with self._context.trace.span(Track.ROUND_END, "end of the round"):
            await self._end_round()

    async def _end_round(self) -> None:
        began = asyncio.get_running_loop().time()
        if self._outer.method == "diloco":
            await self._average_with_all(began)
            return
        pair = await self.matchmaker.conclude()
        swap = None if pair is None else self._exchange.of(pair)
        if swap is None or swap.is_over:
            await self._take_step(None, False, began)
        else:
            with self._context.trace.span(
                Track.ROUND_END, "wait for the partner", partner=swap.pair.partner[-8:]
            ):
                averaged = await self._exchange.finish(swap)
            await self._take_step(swap, averaged, began)
        self.matchmaker.begin_round()
        self._exchange.drop_unless(self._is_wanted)

    async def abandon(self) -> None:
        """The replica's state is about to be replaced: drop everything that was made from the old one."""
        self._exchange.end_all()
        await self._exchange.still()
        await self.matchmaker.let_go()

    def serve(self, rpc: Rpc) -> None:
        self.matchmaker.serve(rpc)
        rpc.handle(Contribute.answered_by(self.on_contribute), Unread.answered_by(self.on_unread))
        if self._context.manifest.outer.method == "diloco":
            self.all_reduce.serve(rpc)

    async def on_contribute(self, request: Request[Contribute]) -> Answer[Done]:
        message = request.message
        pair = Pair(request.peer, message.pair)
        if not self._exchange.has_averaged(pair):
            if not (self._exchange.knows(pair) or self.matchmaker.is_expected(pair.name, pair.partner)):
                raise Refused("unknown-pair")
            try:
                self._exchange.receive(self._exchange.of(pair), message, request.encoded())
            except CodecError:
                self._judgement.refused(request.peer)
                raise
            except (MemoryError, RuntimeError) as error:
                raise named(error) from None
        return Answer(Done())

    async def on_unread(self, request: Request[Unread]) -> Answer[Done]:
        pair = Pair(request.peer, request.message.pair)
        if not self._exchange.has_averaged(pair):
            if not self._exchange.knows(pair):
                raise Refused("unknown-pair")
            try:
                self._exchange.receive_unread(self._exchange.of(pair), request.encoded())
            except CodecError:
                self._judgement.refused(request.peer)
                raise
        return Answer(Done())

    def _begin(self, pair: Pair) -> None:
        """The pair of this round is agreed on, perhaps in place of one that came to nothing."""
        self._exchange.drop_unless(self._is_wanted)
        self._exchange.begin(pair)

    # --- the outer step -----------------------------------------------------------------------

    async def _take_step(self, swap: PairExchange | None, averaged: bool, began: float) -> None:
        context = self._context
        await self._exchange.still()
        seen, before = None, self._replica.round
        try:
            seen = await context.compute.run(
                Priority.OPTIMIZER, self._work_outer_step, swap if averaged else None
            )
        except OutOfMemory:
            if self._replica.round == before:
                averaged = False
                self._tell_no_memory()
                await context.compute.run(Priority.OPTIMIZER, self._replica.finish_round_alone)
        self._judgement.round_ended(swap.pair.partner if swap is not None and averaged else None, seen)
        self._record(swap, averaged, asyncio.get_running_loop().time() - began)
        if swap is not None:
            self._exchange.forget(swap, averaged)

    def _work_outer_step(self, swap: PairExchange | None) -> MeetingSample | None:
        """Take the outer step with what the partner gave, or alone. Returns what the meeting told, if there was
        one.
        """
        replica = self._replica
        if swap is None:
            replica.finish_round_alone()
            return None
        pull = Pull(swap.offer, swap.partners, replica, swap.unread)
        phi = sampled(replica.phi).clone()
        finding = self._judgement.defend(swap.pair.partner, pull)
        swap.offer.owe_rest()
        replica.finish_round_with(pull.piece, pull.whole)
        return self._judgement.seen(pull.sample, phi, swap.phi_sample, finding)

    async def _average_with_all(self, began: float) -> None:
        context, replica, sent_before = self._context, self._replica, self.all_reduce.bytes_sent
        try:
            z = await context.compute.run(Priority.OPTIMIZER, replica.contribution)
        except OutOfMemory:
            self._tell_no_memory()
            await context.compute.run(Priority.OPTIMIZER, replica.finish_round_alone)
        else:
            with context.trace.span(Track.ROUND_END, "wait for all replicas"):
                mean = await self.all_reduce.mean(z)
            await context.compute.run(Priority.OPTIMIZER, replica.finish_round, mean)
        sent = self.all_reduce.bytes_sent - sent_before
        context.counters.gossip_bytes += sent
        self._tell(None, asyncio.get_running_loop().time() - began, sent)

    def _tell_no_memory(self) -> None:
        self._context.events.warn(
            "There is no memory to average with others: this round counts its own progress alone. Close other "
            "programs, or give this node more with --max-memory.",
            "round-alone",
            reason="out of memory",
        )

    # --- what others see ----------------------------------------------------------------------

    def _record(self, swap: PairExchange | None, averaged: bool, blocked_seconds: float) -> None:
        context = self._context
        partner = swap.pair.partner if swap is not None and averaged else None
        context.counters.partner = partner or ""
        if partner is not None:
            context.view.trust(partner)
            self.matchmaker.standing.met()
            context.counters.partners.note(partner)
            context.ledger.note_round(partner)
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
            search_seconds=self.matchmaker.search_seconds,
            blocked_seconds=round(blocked_seconds, 6),
            gossip_bytes=gossip_bytes,
            spread=counters.spread,
            expected_spread=counters.expected_spread,
        )

    def _is_wanted(self, pair: Pair) -> bool:
        return self.matchmaker.is_expected(pair.name, pair.partner)

    async def close(self) -> None:
        self.all_reduce.close()
        await self.abandon()
        await self.matchmaker.close()
