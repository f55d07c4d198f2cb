"""The base of all ways of averaging (`outer.method`), and the way of a replica that averages with nobody."""

# ways that have no use for a step of a round leave it out
# ruff: noqa: B027

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from node.context import Context
from node.model.compute import Priority
from node.model.fragment import Fragment
from node.model.replica import Replica
from node.rounds.meeting import Pair
from protocol.errors import OutOfMemory
from protocol.ground import PeerId
from protocol.rpc.rpc import Rpc


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a round: with which partner its outer step was taken, and what that cost."""

    partner: PeerId | None = None  # None in a round alone, and where replicas do not average in pairs
    gossip_bytes: int = 0  # sent for it
    search_seconds: float | None = None  # from the first proposal to the yes


class Averager(ABC):
    """Ends a replica's rounds in one of the ways to average: says when, averages, takes the outer step.

    What is not abstract here holds for rounds of k inner steps, of which nothing is agreed on beforehand.
    """

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, round {self._replica.round}: {self._doing()}>"

    @abstractmethod
    def _doing(self) -> str:
        """Say in a few words what it is doing."""

    def serve(self, rpc: Rpc) -> None:
        """Answer what other replicas ask for in this way of averaging."""

    # --- while a round goes on ----------------------------------------------------------------

    @property
    def pair(self) -> Pair | None:
        """The pair agreed on for this round."""
        return None

    @property
    def must_end(self) -> bool:
        """True if this end of an inner step is also the end of the round."""
        return self._replica.steps_in_round >= self._context.manifest.outer.inner_steps

    @property
    def will_wait(self) -> bool:
        """True if `finish` has to wait for another peer."""
        return False

    def step_done(self, seconds: float) -> None:
        """Note that an inner step has ended, after so many seconds."""

    # --- the end of a round -------------------------------------------------------------------

    @abstractmethod
    async def finish(self) -> RoundResult:
        """Average with others, where any are there, and take the outer step.

        Always leaves a valid update behind: of this replica alone when averaging fails.
        """

    def begin_round(self) -> None:
        """Begin the next round."""

    async def _step_without_memory(self, round_: int, own: Fragment) -> bool:
        """Take this round's step over `own` alone, for want of memory, and warn. False if it was taken already."""
        if self._replica.round != round_:
            return False
        self._context.events.warn(
            "There is no memory to average with others: this round counts its own progress alone. Close other "
            "programs, or give this node more with --max-memory.",
            "round-alone",
            reason="out of memory",
        )
        await self._context.compute.run(Priority.OPTIMIZER, self._replica.finish_round_alone, own)
        return True

    # --- the end of a run ---------------------------------------------------------------------

    async def seek_last(self) -> bool:
        """Look for a partner for a round after the last inner step of a run, until there is one for it or the next.

        False where rounds are not of pairs.
        """
        return False

    @property
    def may_meet_others(self) -> bool:
        """True if `seek_last` waits for a partner, and there are replicas that may yet be one."""
        return False

    @property
    def partner_trains(self) -> bool:
        """True if the partner of this round still takes inner steps, as far as it has said."""
        return False

    async def retire(self) -> None:
        """Meet nobody any more."""

    async def close(self) -> None:
        """End what runs in the background, and refuse what others still ask for."""

    # --- belonging to the stage ---------------------------------------------------------------

    @property
    def behind(self) -> str:
        """The reason for this replica to download its stage before it averages; empty when it belongs."""
        return ""

    def began_alone(self) -> None:
        """Note that the first state is the seed's or a saved one, and nobody seen could have given another."""

    def download_began(self) -> None:
        """Note that the stage is being downloaded: it is `behind` no more, whatever comes of that."""

    def download_ended(self, succeeded: bool) -> None:
        """Note that a download has ended.

        With success the replica belongs from there on; without, training goes on with what there is, for a while.
        """

    async def abandon(self) -> None:
        """Drop everything that was made from the old state, which is about to be replaced."""


class Alone(Averager):
    """Averages with nobody: every replica goes its own way ("local")."""

    def _doing(self) -> str:
        k = self._context.manifest.outer.inner_steps
        return f"{self._replica.steps_in_round} of {k} inner steps done"

    async def finish(self) -> RoundResult:
        replica, before = self._replica, self._replica.round
        try:
            await self._context.compute.run(Priority.OPTIMIZER, replica.finish_round_alone, replica.whole)
        except OutOfMemory:
            await self._step_without_memory(before, replica.whole)
        return RoundResult()
