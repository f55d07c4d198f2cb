"""Averaging in pairs, as NoLoCo does: a random partner, an exchange with it alone, then the outer step.

All of that is at the end of the round; with `outer.overlap` "phi-early" φ has been sent long before.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable

from node.context import Context
from node.model.compute import Priority
from node.model.fragment import Fragment
from node.model.replica import Replica
from node.model.resources import named
from node.rounds.averager import Averager, RoundResult
from node.rounds.contribution import sampled
from node.rounds.defence import Examination
from node.rounds.effect import Effect
from node.rounds.exchanges import Exchanges
from node.rounds.gain import Gain
from node.rounds.kin import Kin, OtherShape, part_ways
from node.rounds.matchmaker import Matchmaker
from node.rounds.meeting import Pair
from node.rounds.pair_exchange import PairExchange
from node.rounds.pull import Pull
from node.rounds.round_statistics import MeetingSample, RoundStatistics
from node.watch.trace import Track
from protocol.errors import CodecError, OutOfMemory, Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.training import Contribute, Unread
from protocol.rpc.rpc import Answer, Request, Rpc


class PairAverager(Averager):
    """Averages with one random replica of the stage in each round."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        super().__init__(context, replica)
        self._gain = Gain(context.manifest.outer.gain)
        self._statistics = {
            own: RoundStatistics(context, own, Effect(replica, own))
            for own in (replica.whole, *replica.fragments)
        }
        self.exchanges = Exchanges(context, replica)
        self._kin = Kin(context, replica)
        self.matchmaker = Matchmaker(
            context, replica, rng, agreed=self.agreed, avoid=self._statistics[replica.whole].is_quarantined
        )

    def _doing(self) -> str:
        partner = "no partner" if self.pair is None else f"with …{self.pair.partner[-8:]}"
        return f"{partner}, exchanges under way: {self.exchanges.under_way}"

    def serve(self, rpc: Rpc) -> None:
        self.matchmaker.serve(rpc)
        rpc.handle(Contribute.answered_by(self.on_contribute), Unread.answered_by(self.on_unread))

    # --- while a round goes on ----------------------------------------------------------------

    @property
    def pair(self) -> Pair | None:
        return self.matchmaker.pair

    @property
    def must_end(self) -> bool:
        return self.matchmaker.must_end

    @property
    def will_wait(self) -> bool:
        return self.pair is not None

    def step_done(self, seconds: float) -> None:
        self.matchmaker.step_done(seconds)

    def agreed(self, pair: Pair) -> None:
        """Begin with the pair of this round, agreed on perhaps in place of one that came to nothing."""
        self.exchanges.drop_unless(self._is_wanted)
        self.exchanges.begin(pair)

    def _is_wanted(self, pair: Pair) -> bool:
        return self.matchmaker.is_expected(pair.name, pair.partner)

    # --- the end of a round -------------------------------------------------------------------

    async def finish(self) -> RoundResult:
        """Find the partner, exchange with it, clip what it pulls, take the outer step.

        Always leaves a valid update behind: unless both contributions arrive whole before the deadline, the
        group is this replica alone.
        """
        pair = await self.matchmaker.conclude()
        exchange = None if pair is None else self.exchanges.of(pair)
        if exchange is None or exchange.is_over:
            # of what the pair was of: its name says whose turn is over
            alone = self._replica.fragment_of(self.matchmaker.next_fragment)
            own = alone if exchange is None else exchange.own
            await self._clip_and_step(own, None)
            self._record(own, None, None)
            return RoundResult(search_seconds=self.matchmaker.search_seconds)
        with self._context.trace.span(
            Track.ROUND_END, "wait for the partner", partner=exchange.pair.partner[-8:]
        ):
            averaged = await self.exchanges.finish(exchange, self.matchmaker.partner_by)
        averaged, sample = await self._clip_and_step(exchange.own, exchange if averaged else None)
        partner = exchange.pair.partner if averaged else None
        self._record(exchange.own, partner, sample)
        self.exchanges.forget(exchange, averaged)
        return RoundResult(partner, exchange.bytes_sent, self.matchmaker.search_seconds)

    async def _clip_and_step(
        self, own: Fragment, exchange: PairExchange | None
    ) -> tuple[bool, MeetingSample | None]:
        """Take the outer step over `own`, with the partner's or alone.

        Returns whether with the partner's, and what the meeting told.
        """
        await self.exchanges.still()
        before = self._replica.round
        try:
            sample = await self._context.compute.run(Priority.OPTIMIZER, self._work_outer_step, own, exchange)
        except OutOfMemory:
            is_alone = await self._step_without_memory(before, own)
            return exchange is not None and not is_alone, None
        return exchange is not None, sample

    def _work_outer_step(self, own: Fragment, exchange: PairExchange | None) -> MeetingSample | None:
        """Take the outer step on the compute thread. Returns what the meeting told, if there was one."""
        replica, statistics = self._replica, self._statistics[own]
        if exchange is None:
            replica.finish_round_alone(own)
            return None
        pull = Pull(exchange.outgoing, exchange.incoming, own, exchange.unread)
        phi = sampled(own.phi).clone()
        progress = sampled(own.theta) - phi
        settings = own.settings
        finding = self._defend(own, exchange.pair.partner, pull)
        if finding is not None and finding.offence is not None:  # little or nothing of the pull is left
            own.lengthen(1.0)
        replica.finish_round_with(own, pull)
        return statistics.seen(settings, pull.sample, phi, progress, exchange.phi_sample, finding)

    def _defend(self, own: Fragment, partner: PeerId, pull: Pull) -> Examination | None:
        """Let the defence look at the pull; the worst that it found, None where there is no defence.

        A pair of all fragments is judged by each of them: their histories are of everybody whom this replica met,
        one of such pairs would be of those alone who ask for them.
        """
        fragments = self._replica.fragments
        if own in fragments:
            return self._statistics[own].defend(partner, pull)
        found = [self._statistics[one].defend(partner, pull, one.bounds) for one in fragments]
        known = [finding for finding in found if finding is not None]
        return max(known, key=lambda one: (one.offence is not None, one.clipped), default=None)

    def _record(self, own: Fragment, partner: PeerId | None, sample: MeetingSample | None) -> None:
        """Learn from a round of `own`; `partner` is None for one alone."""
        context, replica = self._context, self._replica
        self._statistics[own].round_ended(partner, sample, replica.round / len(replica.fragments))
        is_honest = sample is None or sample.finding is None or sample.finding.offence is None
        if partner is not None and sample is not None and is_honest:
            self._gain.met(partner, sample.shared)
        replicas = round(context.view.replicas(context.stage, context.transport.now()))
        replica.lengthen(self._gain.factor(replicas))
        of_all = [(self._statistics[own], own.parameters) for own in replica.fragments]
        context.counters.spread = _over_all((one.spread, size) for one, size in of_all)
        context.counters.expected_spread = _over_all((one.expected_spread, size) for one, size in of_all)
        context.counters.partner = partner or ""
        if partner is not None:
            context.view.trust(partner)
            self._kin.met(partner)
            self.matchmaker.standing.met()
            context.counters.partners.note(partner)
            context.contributions.note_round(partner)

    def begin_round(self) -> None:
        self.matchmaker.begin_round()
        self.exchanges.drop_unless(self._is_wanted)

    # --- what partners send -------------------------------------------------------------------

    async def on_contribute(self, request: Request[Contribute]) -> Answer[Done]:
        message = request.message
        pair = Pair(request.peer, message.pair)
        if not self.exchanges.has_averaged(pair):
            if not (self.exchanges.knows(pair) or self._is_wanted(pair)):
                raise Refused("unknown-pair")
            try:
                self.exchanges.receive(self.exchanges.of(pair), message, request.encoded())
            except OtherShape:
                part_ways(self._context, request.peer)
                raise
            except CodecError:
                self._statistics[self._replica.whole].refused(request.peer)
                raise
            except (MemoryError, RuntimeError) as error:
                raise named(error) from None
        return Answer(Done())

    async def on_unread(self, request: Request[Unread]) -> Answer[Done]:
        pair = Pair(request.peer, request.message.pair)
        if not self.exchanges.has_averaged(pair):
            if not self.exchanges.knows(pair):
                raise Refused("unknown-pair")
            try:
                self.exchanges.receive_unread(self.exchanges.of(pair), request.encoded())
            except CodecError:
                self._statistics[self._replica.whole].refused(request.peer)
                raise
        return Answer(Done())

    # --- the end of a run ---------------------------------------------------------------------

    async def seek_last(self) -> bool:
        await self.matchmaker.seek_last()
        return self.matchmaker.has_agreed

    @property
    def may_meet_others(self) -> bool:
        return self.matchmaker.accepting and self.matchmaker.others_serve

    @property
    def partner_trains(self) -> bool:
        return self.matchmaker.partner_trains

    async def retire(self) -> None:
        await self.matchmaker.retire()

    async def close(self) -> None:
        await self.abandon()
        await self.matchmaker.close()

    # --- belonging to the stage ---------------------------------------------------------------

    @property
    def behind(self) -> str:
        return self.matchmaker.behind

    def began_alone(self) -> None:
        self.matchmaker.standing.began_alone()

    def download_began(self) -> None:
        self.matchmaker.behind = ""

    def download_ended(self, succeeded: bool) -> None:
        if succeeded:
            self.matchmaker.standing.downloaded()
        else:
            self.matchmaker.standing.download_failed(asyncio.get_running_loop().time())

    async def abandon(self) -> None:
        self.exchanges.end_all()
        await self.exchanges.still()
        await self.matchmaker.let_go()


def _over_all(spreads: Iterable[tuple[float | None, int]]) -> float | None:
    """The spread over fragments of these spreads and sizes, as far as they are known."""
    known = [(spread, size) for spread, size in spreads if spread is not None]
    if not known:
        return None
    return math.sqrt(sum(spread**2 * size for spread, size in known) / sum(size for _, size in known))
