"""The way of a node to a stage: a newcomer chooses one, a member moves to another when it is its turn.

What the way needs of the world around it is an interface, so that a node (`newcomer`, `moving`) and a peer of the
simulator take the same way. Its decisions are the pure functions of `stage_choice` and `capacity`; it reads no clock
and no network itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from node.membership.capacity import Capacities, Move, MovePatience, Peer, next_move
from node.membership.stage_choice import Arrival, better_stage, choose_stage, poorest_stages
from protocol.errors import NolocoError
from protocol.ground import PeerId

logger = logging.getLogger(__name__)

NEWCOMERS_SETTLE = (
    1.5  # seconds for those that start together to see each other's intention, and then their claims
)
LOOKS = 3  # at most, after a claim; one is enough unless several newcomers met
VISITED_PER_STAGE = 2
MOST_VISITED = 16

# In record lifetimes. A dead peer's record may stand for one of them, and the next one shows what is left.
PATIENCE = 2.0
REST = 3.0  # what a peer stays where it came to, so that the others' views have settled
PAUSES = (0.4, 0.6)  # between looks; at random, or all would ask at once
MOVERS_SETTLE = (
    6.0  # seconds for claims of the same moment to be seen by each other: more than `DHT_DEADLINE`
)
# with more peers, looks are rarer in proportion: a node reads as much in a minute as with so many
PROMPT_PEERS = 50


class Around(Protocol):
    """The world around a node on its way. Whatever fails on the network raises `NolocoError`."""

    def elapsed(self) -> float:
        """Return the seconds of a clock that nobody sets."""

    async def wait(self, seconds: float) -> None:
        """Wait."""


class AroundNewcomer(Around, Protocol):
    """The world around a newcomer that chooses."""

    async def announce_intention(self) -> Arrival:
        """Announce that this node is choosing a stage; return its place in the order of newcomers."""

    async def read_newcomers(self) -> list[Arrival]:
        """Read who else is choosing."""

    async def survey_living(self) -> list[Peer]:
        """Read which others serve or have claimed a stage, without those that do not answer."""

    async def ask_whether_alive(self, peers: Sequence[PeerId]) -> Collection[PeerId]:
        """Ask peers whether they live; return those known to be dead."""

    async def measure_links(self, peers: Sequence[PeerId]) -> None:
        """Measure the links to these peers."""

    def excess(self, peers: Sequence[Peer]) -> Mapping[int, float]:
        """Return `stage_choice.excess_seconds` of each stage by the links that were measured."""

    def report_choice(
        self, stage: int, peers: Sequence[Peer], rivals: int, excess: Mapping[int, float]
    ) -> None:
        """Report the stage that was chosen, while so many rivals chose."""

    async def claim_stage(self, stage: int, instead_of: int | None = None) -> float:
        """Claim the stage in place of an earlier one; return the claim's wall-clock time."""


@dataclass(frozen=True)
class Survey:
    """All replicas of the run, as far as they can be relied on, and the number of peers read."""

    peers: list[Peer]
    known: int
    at: float  # wall clock


class AroundMember(Around, Protocol):
    """The world around a member that may move."""

    async def read_plan(self) -> None:
        """Look for a newer plan of the run's owner."""

    def planned(self, peers: Sequence[Peer]) -> Mapping[PeerId, int]:
        """Return the stages that the owner's plan has for these peers."""

    async def survey_all(self, watched: Collection[int] = ()) -> Survey:
        """Read all replicas; of the stages that are `watched` those that the node has read for its own needs."""

    async def read_leases(self, peers: Sequence[Peer]) -> list[Arrival]:
        """Read the moves that others of these peers have announced, each by its time and peer."""

    async def take_lease(self, source: int, target: int) -> float | None:
        """Announce a move; return its wall-clock time, None where others may not see it in time."""

    def keep_lease(self) -> None:
        """Renew the lease until the move is over."""

    async def withdraw_lease(self) -> None:
        """Let others move instead."""

    def fits(self, source: int, target: int) -> bool:
        """Return whether this machine can serve `target` in place of `source`."""

    async def has_stand_in(self, stage: int) -> bool:
        """Return whether another replica that serves the stage answers, whatever the records say."""


@dataclass(frozen=True)
class Choice:
    """A newcomer's choice of a stage, of those that it `may_serve`. `work` is that of each stage's microbatch."""

    me: PeerId
    work: Sequence[float]
    may_serve: Sequence[int]
    rng: random.Random
    around: AroundNewcomer

    async def choose(self) -> int:
        """Claim and return the stage that the swarm needs most."""
        arrival = await self.around.announce_intention()
        visited = await self._look_around()
        newcomers = await self.around.read_newcomers()
        peers = await self.around.survey_living()
        excess = self.around.excess(peers) if visited else {}
        placed = {p.peer for p in peers}
        unplaced = [each for each in newcomers if each[1] not in placed]
        dead = await self.around.ask_whether_alive([peer for _, peer in unplaced])
        choosing = [each for each in unplaced if each[1] not in dead]
        stage = choose_stage(peers, self.work, choosing, arrival, self.may_serve, excess)
        self.around.report_choice(stage, peers, len([each for each in choosing if each != arrival]), excess)
        return await self._settle(stage, by_links=bool(excess))

    async def _look_around(self) -> bool:
        """Show the intention; meanwhile measure a few links where they can decide. Returns whether they can."""
        settled = self.around.elapsed() + NEWCOMERS_SETTLE
        peers = await self.around.survey_living()
        stages = poorest_stages(Capacities(peers, self.work), self.may_serve)
        nearby = sorted({s + step for s in stages for step in (-1, 0, 1)}) if len(stages) > 1 else []
        sample = self._sample([[p.peer for p in peers if p.stage == s and p.is_serving] for s in nearby])
        if sample:
            await self.around.measure_links(sample)
        await self.around.wait(max(0.0, settled - self.around.elapsed()))
        return bool(sample)

    def _sample(self, groups: Sequence[Sequence[PeerId]]) -> list[PeerId]:
        chosen = [peer for g in groups for peer in self.rng.sample(g, min(VISITED_PER_STAGE, len(g)))]
        return self.rng.sample(chosen, min(MOST_VISITED, len(chosen)))

    async def _settle(self, stage: int, *, by_links: bool) -> int:
        """Claim the stage, then see who else did: of several that met, the last to come goes elsewhere."""
        since = await self.around.claim_stage(stage)
        for look in range(LOOKS):
            await self.around.wait(NEWCOMERS_SETTLE * self.rng.uniform(1, 2))
            others = await self.around.survey_living()
            peers = [*others, Peer(self.me, stage, since=since, is_serving=False)]
            met = any(p.stage == stage and not p.is_serving for p in others)
            better = better_stage(
                peers, self.work, self.me, self.may_serve, by_links=by_links, is_last_word=look == LOOKS - 1
            )
            if better is None and (not met or look):
                break
            if better is not None:
                since = await self.around.claim_stage(better, instead_of=stage)
                stage = better
        return stage


@dataclass(frozen=True)
class Call:
    """A call to another stage, for which this node holds the lease."""

    target: int
    was_empty: bool  # nobody served it


@dataclass(frozen=True)
class Moves:
    """The moves of a member, when it is its turn, to a stage that it `may_serve`, which may shrink meanwhile.

    `lifetime` is that of records, in seconds.
    """

    me: PeerId
    stage: int
    work: Sequence[float]
    may_serve: Collection[int]
    lifetime: float
    patience: MovePatience
    rng: random.Random
    around: AroundMember

    async def wait_for_call(self, known: int) -> Call:
        """Return the next call; `known` peers are known at first. Whatever fails is tried again at the next look."""
        while True:
            await self.around.wait(pause_before_look(known, self.lifetime) * self.rng.uniform(*PAUSES))
            try:
                await self.around.read_plan()
                survey = await self.around.survey_all(range(self.stage - 1, self.stage + 2))
                known = survey.known
                call = await self._call(survey)
                if call is None:
                    continue
                fits = self.around.fits(self.stage, call.target)
                if fits and await self.around.has_stand_in(self.stage):
                    return call
                await self.around.withdraw_lease()
            except NolocoError as problem:
                logger.debug("Looking whether to move: %s", problem)

    async def _call(self, survey: Survey) -> Call | None:
        """Return a call if it is this node's turn and no other one's lease came first."""
        rested = survey.at - REST * self.lifetime
        move, now = self._next_move(survey.peers, rested), self.around.elapsed()
        is_leased = bool(await self.around.read_leases(survey.peers))
        if not self.patience.is_over(move, is_leased, now):
            return None
        if move is None or move.peer != self.me or move.target not in self.may_serve:
            return None
        if not await self._lease(move, survey.peers):
            return None
        peers = (await self.around.survey_all()).peers
        again = self._next_move(peers, rested, only=self.me)
        if again is not None and again.target == move.target:
            return Call(move.target, not any(p.stage == move.target and p.is_serving for p in peers))
        await self.around.withdraw_lease()
        return None

    async def _lease(self, move: Move, peers: Sequence[Peer]) -> bool:
        """Take the lease; return whether this node may move: its lease stands and no peer's came before it."""
        since = await self.around.take_lease(move.source, move.target)
        if since is not None:
            await self.around.wait(MOVERS_SETTLE)
            if all((since, self.me) < other for other in await self.around.read_leases(peers)):
                self.around.keep_lease()
                return True
        await self.around.withdraw_lease()
        return False

    def _next_move(self, peers: Sequence[Peer], rested: float, only: PeerId | None = None) -> Move | None:
        return next_move(peers, self.work, self.around.planned(peers), rested, only)


def pause_before_look(peers: int, lifetime: float) -> float:
    """Return the seconds between two looks at the records of so many peers; a look comes after half on average."""
    return lifetime * max(1.0, peers / PROMPT_PEERS)
