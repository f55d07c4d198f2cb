"""What the ways of averaging (`outer.method`) have in common, and the way of a replica that averages with nobody."""

# ways that have no use for a step of a round leave it out
# ruff: noqa: B027

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from node.context import Context
from node.model.compute import Priority
from node.model.replica import Replica
from node.rounds.meeting import Pair
from protocol.errors import OutOfMemory
from protocol.ground import PeerId
from protocol.rpc import Rpc


@dataclass(frozen=True)
class RoundResult:
    """What became of a round: with which partner its outer step was taken, and what that cost."""

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
        """What it is at, in a few words."""

    def serve(self, rpc: Rpc) -> None:
        """Answer what other replicas ask for in this way of averaging."""

    # --- while a round goes on ----------------------------------------------------------------

    @property
    def pair(self) -> Pair | None:
        """The pair agreed on for this round."""
        return None

    @property
    def must_end(self) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        return self._replica.steps_in_round >= self._context.manifest.outer.inner_steps

    @property
    def will_wait(self) -> bool:
        """Whether `finish` has to wait for another peer."""
        return False

    def step_done(self, seconds: float) -> None:
        """An inner step has ended, after so many seconds."""

    # --- the end of a round -------------------------------------------------------------------

    @abstractmethod
    async def finish(self) -> RoundResult:
        """Average with others, where any are there, and take the outer step.

        Always leaves a valid update behind: of this replica alone when averaging fails.
        """

    def begin_round(self) -> None:
        """The next round begins."""

    async def _step_without_memory(self, round_: int) -> bool:
        """Memory ran out at the end of this round: tell so and take the step alone. False if it was taken already."""
        if self._replica.round != round_:
            return False
        self._context.events.warn(
            "There is no memory to average with others: this round counts its own progress alone. Close other "
            "programs, or give this node more with --max-memory.",
            "round-alone",
            reason="out of memory",
        )
        await self._context.compute.run(Priority.OPTIMIZER, self._replica.finish_round_alone)
        return True

    # --- the end of a run ---------------------------------------------------------------------

    async def seek_last(self) -> bool:
        """Look for a partner for a round after the last inner step of a run, until there is one for it or the next.

        False where rounds are not of pairs.
        """
        return False

    @property
    def may_meet_others(self) -> bool:
        """Whether `seek_last` waits for a partner, and there are replicas that may yet be one."""
        return False

    @property
    def partner_trains(self) -> bool:
        """Whether the partner of this round takes inner steps still, as far as it has said."""
        return False

    async def retire(self) -> None:
        """Meet nobody any more."""

    async def close(self) -> None:
        """End what runs in the background, and refuse what others still ask for."""

    # --- belonging to the stage ---------------------------------------------------------------

    @property
    def behind(self) -> str:
        """Why this replica should download its stage before it averages; empty when it belongs."""
        return ""

    def began_alone(self) -> None:
        """Its first state is the seed's or a saved one, and it saw nobody who could have given another."""

    def download_began(self) -> None:
        """Its stage is being downloaded: it is `behind` no more, whatever comes of that."""

    def download_ended(self, succeeded: bool) -> None:
        """A download has ended. With success the replica belongs from there on; without, training goes on with what
        there is, for a while.
        """

    async def abandon(self) -> None:
        """The replica's state is about to be replaced: drop everything that was made from the old one."""


class Alone(Averager):
    """Averages with nobody: every replica goes its own way ("local")."""

    def _doing(self) -> str:
        k = self._context.manifest.outer.inner_steps
        return f"{self._replica.steps_in_round} of {k} inner steps done"

    async def finish(self) -> RoundResult:
        before = self._replica.round
        try:
            await self._context.compute.run(Priority.OPTIMIZER, self._replica.finish_round_alone)
        except OutOfMemory:
            await self._step_without_memory(before)
        return RoundResult()
