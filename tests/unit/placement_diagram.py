"""Draws the ways to a stage from what they ask: `python tests/unit/placement_diagram.py` prints both diagrams.

Newcomers and members take their ways in hundreds of random worlds; an arrow goes from each question to the next.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

from test_ways_to_a_stage import EARLIER, LATER, LIFETIME, ME, World, replica

from node.membership.capacity import MovePatience, Peer
from node.membership.placement import Choice, Moves

LIVES = 300
LOOKS = 6  # of a member
NEWCOMER = (
    "announce_intention", "survey_living", "measure_links", "read_newcomers", "ask_whether_alive", "report_choice",
    "claim_stage",
)  # fmt: skip
MEMBER = (
    "read_plan", "survey_all", "read_leases", "take_lease", "withdraw_lease", "keep_lease", "fits", "has_stand_in",
)  # fmt: skip
WORK = [1.0, 1.0]
Arrows = set[tuple[str, str]]


class _Over(Exception):
    """Ends the way of a member that stays where it is."""


class RandomWorld(World):
    """A world that answers by dice, and the names of what it was asked."""

    def __init__(self, seed: int) -> None:
        super().__init__([[]])
        self.dice = random.Random(seed)
        self.way: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in (*NEWCOMER, *MEMBER):
            self.way.append(name)
            self._throw()
        return super().__getattribute__(name)

    def _throw(self) -> None:
        likely = self.dice.random
        self.surveys = [self._peers()]
        self.newcomers = [(40.0, EARLIER)] if likely() < 0.5 else []
        self.leases = [[(1.0, LATER)] if likely() < 0.2 else []]
        self.links = {0: 0.0, 1: 1.0} if likely() < 0.3 else {}
        self.lease = 100.0 if likely() < 0.8 else None
        self.has_room, self.another_answers = likely() < 0.7, likely() < 0.7
        if len([step for step in self.way if step == "read_plan"]) > LOOKS:
            raise _Over
        self.asked.clear()

    def _peers(self) -> list[Peer]:
        here, there = self.dice.choice([(3, 0), (3, 0), (3, 1), (1, 1), (0, 0)])
        others = [
            replica(f"peer {stage} {n}", stage)
            for stage, count in enumerate((here, there))
            for n in range(count)
        ]
        if self.dice.random() < 0.3:
            others.append(replica("met", 1, is_serving=False))
        return others if self.way[-1] in NEWCOMER else [replica(ME, 0), *others]


def steps_of(world: RandomWorld, way: Awaitable[object]) -> list[str]:
    """What was asked, in order; the end of the way where it came to one."""
    try:
        way.__await__().send(None)
    except StopIteration:
        return ["[*]", *world.way, "[*]"]
    except _Over:
        return ["[*]", *world.way[:-1]]
    raise AssertionError("the world made the way wait")


def newcomers_arrows() -> Arrows:
    found: Arrows = set()
    for seed in range(LIVES):
        world = RandomWorld(seed)
        way = Choice(ME, WORK, range(2), random.Random(seed), world).choose()
        found.update(pairwise(steps_of(world, way)))
    return found


def members_arrows() -> Arrows:
    found: Arrows = set()
    for seed in range(LIVES):
        world = RandomWorld(seed)
        moves = Moves(ME, 0, WORK, (0, 1), LIFETIME, MovePatience(0.0), random.Random(seed), world)
        found.update(pairwise(steps_of(world, moves.wait_for_call(4))))
    return found


def drawn(arrows: Arrows, order: tuple[str, ...]) -> str:
    """The diagram in Mermaid's language."""
    places = {name: place for place, name in enumerate(("[*]", *order))}
    rows = sorted(arrows, key=lambda arrow: [places[name] for name in arrow])
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {a} --> {b}" for a, b in rows), "```", ""])


def diagrams() -> list[str]:
    return [drawn(newcomers_arrows(), NEWCOMER), drawn(members_arrows(), MEMBER)]


if __name__ == "__main__":
    print("\n".join(diagrams()), end="")
