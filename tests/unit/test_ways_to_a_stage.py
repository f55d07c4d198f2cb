"""The ways of a newcomer and of a member to a stage, in a world that a test writes down: no loop, no network."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from node.membership.capacity import MovePatience, Peer
from node.membership.placement import MOVERS_SETTLE, NEWCOMERS_SETTLE, Call, Choice, Moves, Survey
from node.membership.stage_choice import Arrival
from protocol.errors import PeerUnreachable
from protocol.ground import PeerId

T = TypeVar("T")
ME, EARLIER, LATER = PeerId("0, me"), PeerId("earlier"), PeerId("later")
LIFETIME = 60.0


def result_of(way: Awaitable[T]) -> T:
    """Take a way whose world never makes it wait."""
    with pytest.raises(StopIteration) as end:
        way.__await__().send(None)
    found: T = end.value.value
    return found


def replica(name: str, stage: int, *, is_serving: bool = True, since: float = 0.0) -> Peer:
    return Peer(PeerId(name), stage, since=since, is_serving=is_serving, may_serve=frozenset({0, 1}))


@dataclass
class World:
    """What the way asked for, in order, and the answers that a test gives."""

    surveys: list[list[Peer]]  # one for each; the last one is given again
    newcomers: list[Arrival] = field(default_factory=list)
    dead: set[PeerId] = field(default_factory=set)
    leases: list[list[Arrival]] = field(default_factory=lambda: [[]])
    plan: dict[PeerId, int] = field(default_factory=dict)
    links: dict[int, float] = field(default_factory=dict)
    lease: float | None = 100.0
    has_room: bool = True
    another_answers: bool = True
    asked: list[str] = field(default_factory=list)
    now: float = 0.0

    def elapsed(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 100 * LIFETIME, self.asked

    def _next_survey(self) -> list[Peer]:
        return self.surveys.pop(0) if len(self.surveys) > 1 else self.surveys[0]

    # a newcomer's

    async def announce_intention(self) -> Arrival:
        self.asked.append("intention")
        return 50.0, ME

    async def read_newcomers(self) -> list[Arrival]:
        self.asked.append(f"newcomers at {self.now:g}")
        return [(50.0, ME), *self.newcomers]

    async def survey_living(self) -> list[Peer]:
        return self._next_survey()

    async def ask_whether_alive(self, peers: Sequence[PeerId]) -> Collection[PeerId]:
        return self.dead

    async def measure_links(self, peers: Sequence[PeerId]) -> None:
        self.now += 1.0
        self.asked.append(f"links to {len(peers)}")

    def excess(self, peers: Sequence[Peer]) -> Mapping[int, float]:
        return self.links

    def report_choice(
        self, stage: int, peers: Sequence[Peer], rivals: int, excess: Mapping[int, float]
    ) -> None:
        self.asked.append(f"chose {stage}, rivals {rivals}")

    async def claim_stage(self, stage: int, instead_of: int | None = None) -> float:
        self.asked.append(f"claim {stage}" + (f" for {instead_of}" if instead_of is not None else ""))
        return 50.0

    # a member's

    async def read_plan(self) -> None:
        self.asked.append("plan")

    def planned(self, peers: Sequence[Peer]) -> Mapping[PeerId, int]:
        return self.plan

    async def survey_all(self, watched: Collection[int] = ()) -> Survey:
        found = self._next_survey()
        return Survey(found, len(found), 10_000.0)

    async def read_leases(self, peers: Sequence[Peer]) -> list[Arrival]:
        return self.leases.pop(0) if len(self.leases) > 1 else self.leases[0]

    async def take_lease(self, source: int, target: int) -> float | None:
        self.asked.append(f"lease {source} to {target}")
        return self.lease

    def keep_lease(self) -> None:
        self.asked.append("keep")

    async def withdraw_lease(self) -> None:
        self.asked.append("withdraw")
        if self.asked.count("withdraw") == 2:
            raise _Enough

    def fits(self, source: int, target: int) -> bool:
        return self.has_room

    async def has_stand_in(self, stage: int) -> bool:
        return self.another_answers


class _Enough(Exception):
    """Ends a way that would go on for ever."""


def choice(world: World, stages: int = 2) -> int:
    return result_of(Choice(ME, [1.0] * stages, range(stages), random.Random(1), world).choose())


def test_a_newcomer_takes_the_stage_with_the_fewest_replicas_once_its_intention_had_time_to_be_seen() -> None:
    world = World([[replica("a", 0), replica("b", 0), replica("c", 1)]])
    assert choice(world) == 1
    assert world.asked == ["intention", f"newcomers at {NEWCOMERS_SETTLE:g}", "chose 1, rivals 0", "claim 1"]


def test_of_two_that_choose_together_the_later_one_leaves_the_poorest_stage_to_the_other() -> None:
    world = World([[replica("a", 0), replica("b", 0), replica("c", 1), replica("d", 1)]], [(49.0, EARLIER)])
    assert choice(world) == 1


def test_a_rival_that_is_dead_or_placed_by_now_does_not_count() -> None:
    serving = [replica("a", 0), replica("b", 0), replica("c", 1), replica("d", 1)]
    assert choice(World([serving], [(49.0, EARLIER)], dead={EARLIER})) == 0
    placed = [*serving, replica(EARLIER, 1, is_serving=False)]
    assert choice(World([placed], [(49.0, EARLIER)])) == 0


def test_links_are_measured_where_stages_are_alike_within_the_time_of_settling_and_decide() -> None:
    serving = [replica("a", 0), replica("b", 1)]
    world = World([serving], links={0: 0.5, 1: -0.5})
    assert choice(world) == 1
    assert world.asked[1:3] == ["links to 2", f"newcomers at {NEWCOMERS_SETTLE:g}"]


def test_of_several_that_claimed_one_stage_the_last_to_come_goes_elsewhere() -> None:
    before = [replica("a", 0), replica("b", 1), replica("c", 1)]
    met = [*before, *(replica(f"{EARLIER} {n}", 0, is_serving=False, since=49.0) for n in range(2))]
    world = World([before, before, met])
    assert choice(world) == 1
    assert world.asked[-1] == "claim 1 for 0"
    met = [*before, *(replica(f"{LATER} {n}", 0, is_serving=False, since=51.0) for n in range(2))]
    assert choice(World([before, before, met])) == 0, "the later one goes"


def call(world: World, stage: int = 0, may_serve: Collection[int] = (0, 1)) -> Call:
    moves = Moves(ME, stage, [1.0, 1.0], may_serve, LIFETIME, MovePatience(0.0), random.Random(1), world)
    return result_of(moves.wait_for_call(4))


RICH = [replica(ME, 0), replica("a", 0), replica("b", 0)]


def test_a_member_of_the_rich_stage_is_called_to_one_that_nobody_serves() -> None:
    world = World([RICH])
    assert call(world) == Call(1, was_empty=True)
    assert world.asked == ["plan", "lease 0 to 1", "keep"]
    assert world.now >= 0.4 * LIFETIME + MOVERS_SETTLE


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lease": None}, "the lease took too long to store"),
        ({"leases": [[], [(99.0, EARLIER)]]}, "another one's lease came first"),
        (
            {"surveys": [RICH, [*RICH, replica("c", 1), replica("d", 1), replica("e", 1)]]},
            "it is not needed now",
        ),
        ({"has_room": False}, "the stage does not fit"),
        ({"another_answers": False}, "its own stage would have nobody"),
    ],
)
def test_a_lease_is_withdrawn_when(changed: dict[str, object], why: str) -> None:
    world = World([RICH])
    for name, answer in changed.items():
        setattr(world, name, answer)
    if "surveys" in changed:
        world.surveys = [*world.surveys, *world.surveys]
    if "leases" in changed:
        world.leases = world.leases * 2
    moves = Moves(ME, 0, [1.0, 1.0], (0, 1), LIFETIME, MovePatience(0.0), random.Random(1), world)
    with pytest.raises(_Enough):
        moves.wait_for_call(4).send(None)
    assert world.asked.count("withdraw") == 2, why


def test_nobody_takes_a_lease_while_another_one_moves() -> None:
    world = World([RICH], leases=[[(1.0, EARLIER)]] * 3 + [[]])
    call(world)
    assert world.asked == ["plan"] * 4 + ["lease 0 to 1", "keep"]


def test_a_look_that_fails_is_repeated() -> None:
    class Failing(World):
        async def read_plan(self) -> None:
            await super().read_plan()
            if len(self.asked) < 3:
                raise PeerUnreachable("nobody")

    world = Failing([RICH])
    assert call(world).target == 1
    assert world.asked[:3] == ["plan"] * 3
