"""Effective replicas: how many replicas that all-reduce in every step learn as well as these.

One more volunteer helps as much as it makes this number larger. All-reduce's loss falls with its replicas along a
curve; where a setting's loss lies on it says how many of them it is worth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import mean

import numpy as np

from bootstrap.lab.simulation.learning import LearningResult

ALIKE = (
    "stages",
    "steps",
    "microbatches",
    "sequences",
    "validation_sequences",
)  # what one curve has in common


class AllReduceCurves:
    """The loss of all-reduce by its number of replicas: of several settings of one number, as of rates, the best."""

    def __init__(self, outcomes: Iterable[LearningResult]) -> None:
        losses = defaultdict[tuple[str, int, str], list[float]](list)
        for outcome in outcomes:
            facts = outcome.setting
            if facts["method"] == "all-reduce":
                others = {name: value for name, value in facts.items() if name != "seed"}
                losses[_of(facts), facts["replicas"], str(others)].append(outcome.loss)
        self._curves = defaultdict[str, dict[int, float]](dict)
        for (of, replicas, _), found in losses.items():
            curve = self._curves[of]
            curve[replicas] = min(mean(found), curve.get(replicas, math.inf))

    def effective(self, group: Iterable[LearningResult]) -> float | None:
        """The replicas that all-reduce needs for the mean loss of these, by log N between the two numbers next to it.

        None where fewer than two numbers were tried, and beyond them.
        """
        outcomes = list(group)
        curve = self._curves.get(_of(outcomes[0].setting), {})
        points = sorted((loss, math.log2(replicas)) for replicas, loss in curve.items())
        loss = mean(outcome.loss for outcome in outcomes)
        if len(points) < 2 or not points[0][0] <= loss <= points[-1][0]:
            return None
        return float(2 ** np.interp(loss, [point[0] for point in points], [point[1] for point in points]))


def _of(facts: dict[str, object]) -> str:
    return str([facts.get(name) for name in ALIKE])
