"""A plan as good as the one found, for which fewer devices have to change their place. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

AS_GOOD = 1.01  # of the cost: less than links change within the hour


def with_fewest_moves(
    cost: Callable[[Integers], float], current: Integers, found: Integers, stages: int
) -> Integers:
    """A placement [N] near `current` whose cost is within 1 % of the cost of `found`.

    Tried are the present placement, the stages in the opposite order, and then to leave devices where they are, one
    by one or by letting two of the plan change places, as long as something is won: up to N² evaluations a pass.
    """
    limit = AS_GOOD * cost(found)
    if cost(current) <= limit:
        return current.copy()
    candidates = [found, stages - 1 - found]
    planned = min((p for p in candidates if cost(p) <= limit), key=lambda p: int((p != current).sum())).copy()
    while (nearer := _step_back(cost, current, planned, limit)) is not None:
        planned = nearer
    return planned


def _step_back(
    cost: Callable[[Integers], float], current: Integers, planned: Integers, limit: float
) -> Integers | None:
    """The first change that leaves one device more where it is; two devices more before one."""
    misplaced = np.flatnonzero(planned != current)
    for device in misplaced:
        goal, home = planned[device], current[device]
        at_home = np.flatnonzero(planned == home)
        swaps = sorted(at_home, key=lambda e: (current[e] != goal, current[e] == home, int(e)))
        for other in [*(e for e in swaps if current[e] != home), None]:
            tried = planned.copy()
            tried[device] = home
            if other is not None:
                tried[other] = goal
            if cost(tried) <= limit:
                return tried
    return None
