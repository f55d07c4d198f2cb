"""Which fault comes when and to whom: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

PERIOD_SECONDS = 15.0  # between the beginnings of two faults

Kind = Literal["kill", "freeze", "p2pd", "cut", "disk", "clock", "nan"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SECONDS: dict[Kind, tuple[float, float]] = {  # how long each lasts, from and to
    "kill": (1.0, 4.0),  # until the node is started again
    "freeze": (10.0, 20.0),
    "p2pd": (0.0, 0.0),
    "cut": (5.0, 10.0),
    "disk": (20.0, 20.0),
    "clock": (30.0, 30.0),
    "nan": (20.0, 20.0),
}
CLOCK_HOURS = 2.0  # forward or back


@dataclass(frozen=True)
class Fault:
    """`hours` is how far a clock jumps."""

    kind: Kind
    node: str
    seconds: float
    hours: float = 0.0


class Schedule:
    """Mutable state: the random generator, and the kinds that have not come since all had.

    A kind comes again only after all others, so that seven periods show each.
    """

    def __init__(self, seed: int, stages: Mapping[str, int]) -> None:
        """`stages` has each node's, by its name."""
        self._rng = random.Random(seed)
        self._stages = stages
        self._last_stage = max(stages.values())
        self._bag: list[Kind] = []

    def draw(self, well: Collection[str]) -> Fault | None:
        """The next fault, for one of the nodes that are `well`; never for the only such replica of its stage.

        None when nobody may be disturbed. Only replicas of the last stage compute a loss that can be NaN.
        """
        kind = self._next_kind()
        candidates = [
            node
            for node in sorted(well)
            if sum(self._stages[other] == self._stages[node] for other in well) > 1
            and (kind != "nan" or self._stages[node] == self._last_stage)
        ]
        if not candidates:
            return None
        seconds = round(self._rng.uniform(*SECONDS[kind]), 1)
        hours = self._rng.choice((-CLOCK_HOURS, CLOCK_HOURS)) if kind == "clock" else 0.0
        return Fault(kind, self._rng.choice(candidates), seconds, hours)

    def _next_kind(self) -> Kind:
        if not self._bag:
            self._bag = self._rng.sample(KINDS, len(KINDS))
        return self._bag.pop()
