"""Ends rounds in the way of averaging that the run has chosen, and tells whoever watches."""

from __future__ import annotations

import asyncio
import random

from node.context import Context
from node.model.replica import Replica
from node.rounds.all_reduce import AllReduce
from node.rounds.averager import Alone, Averager, RoundResult
from node.rounds.gossip import PairAverager
from node.watch.trace import Track
from protocol.rpc.rpc import Rpc


def averager_of(context: Context, replica: Replica, rng: random.Random) -> Averager:
    """The way of averaging that the manifest names as `outer.method`."""
    outer = context.manifest.outer
    if outer.averages_pairs:
        return PairAverager(context, replica, rng)
    return AllReduce(context, replica) if outer.method == "diloco" else Alone(context, replica)


class Rounds:
    """Ends the rounds of a replica by its `averager`, and tells how they went."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._began = context.trace.now()
        self.averager = averager_of(context, replica, rng)

    def __repr__(self) -> str:
        return f"<Rounds by {self.averager}>"

    def serve(self, rpc: Rpc) -> None:
        self.averager.serve(rpc)

    # --- while a round goes on ----------------------------------------------------------------

    @property
    def must_end(self) -> bool:
        """True if this end of an inner step is also the end of the round."""
        return self.averager.must_end

    @property
    def will_wait(self) -> bool:
        """True if `finish` has to wait for another peer."""
        return self.averager.will_wait

    def step_done(self, seconds: float) -> None:
        """Note that an inner step has ended, after so many seconds."""
        self.averager.step_done(seconds)

    # --- the end of a round -------------------------------------------------------------------

    async def finish(self) -> None:
        """Average with others, where any are there, take the outer step, and begin the next round.

        Always leaves a valid update behind: of this replica alone when averaging fails.
        """
        with self._context.trace.span(Track.ROUND_END, "end of the round"):
            began = asyncio.get_running_loop().time()
            result = await self.averager.finish()
            self._tell(result, asyncio.get_running_loop().time() - began)
            self.averager.begin_round()

    def _tell(self, result: RoundResult, blocked_seconds: float) -> None:
        counters, trace = self._context.counters, self._context.trace
        counters.blocked_seconds += blocked_seconds
        began, self._began = self._began, trace.now()
        trace.complete(
            Track.ROUNDS,
            f"round {self._replica.round}",
            began,
            self._began,
            partner=result.partner[-8:] if result.partner else "alone",
            gossip_bytes=result.gossip_bytes,
            blocked_ms=round(blocked_seconds * 1e3, 3),
        )
        self._context.events.emit(
            "round",
            round=self._replica.round,
            step=self._replica.step,
            partner=result.partner,
            search_seconds=result.search_seconds,
            blocked_seconds=round(blocked_seconds, 6),
            gossip_bytes=result.gossip_bytes,
            spread=counters.spread,
            expected_spread=counters.expected_spread,
        )

    # --- the end of a run ---------------------------------------------------------------------

    async def seek_last(self) -> bool:
        """Look for a partner for a round after the last inner step of a run, until there is one for it or the next.

        False where rounds are not of pairs.
        """
        return await self.averager.seek_last()

    @property
    def may_meet_others(self) -> bool:
        """True if `seek_last` waits for a partner, and there are replicas that may yet be one."""
        return self.averager.may_meet_others

    @property
    def partner_trains(self) -> bool:
        """True if the partner of this round still takes inner steps, as far as it has said."""
        return self.averager.partner_trains

    async def retire(self) -> None:
        """Meet nobody any more."""
        await self.averager.retire()

    async def close(self) -> None:
        """End what runs in the background, and refuse what others still ask for."""
        await self.averager.close()

    # --- belonging to the stage ---------------------------------------------------------------

    @property
    def behind(self) -> str:
        """The reason for this replica to download its stage before it averages; empty when it belongs."""
        return self.averager.behind

    def began_alone(self) -> None:
        """Note that the first state is the seed's or a saved one, and nobody seen could have given another."""
        self.averager.began_alone()

    def download_began(self) -> None:
        """Note that the stage is being downloaded: it is `behind` no more, whatever comes of that."""
        self.averager.download_began()

    def download_ended(self, succeeded: bool) -> None:
        """Note that a download has ended.

        With success the replica belongs from there on; without, training goes on with what there is, for a while.
        """
        self.averager.download_ended(succeeded)

    async def abandon(self) -> None:
        """Drop everything that was made from the old state, which is about to be replaced."""
        await self.averager.abandon()
