"""Local search by chains of moves, as in DT-FM and as in Kernighan and Lin.

A chain starts in the group with the best gain, moves one device to its best target, goes on from that target, and
ends when it comes home, so that all sizes are as before; its best prefix, closed by a move home, is kept. With w
the seconds of a macro-batch over a link, one way, and A a device's own group:

- DT-FM: a group's candidate is the device with the fastest link to a group-mate, and gain(d: A → B) = mean over B of
  w_de − min over A of w_de. A fast link inside a group is wasted, since DP waits for the slowest there; between
  two groups the matching can use it.
- Kernighan and Lin: any device may move, gain(d: A → B) = Σ over A of w_de − Σ over B of w_de. It keeps fast links
  inside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bootstrap.placement.kernels import compiled

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LOCKED = -1


@compiled
def improve(weights: Floats, stage_of: Integers, stages: int, wasted_links: bool) -> float:
    """One pass of chains over `stage_of` [N], in place; returns the gain. `wasted_links`: DT-FM's gain, not KL's.

    A device moves at most once in a pass. `weights` [N, N] is symmetric with a diagonal of 0.
    """
    count = stage_of.size
    sums, sizes, moved = np.zeros((count, stages)), np.zeros(stages), np.zeros(count, np.bool_)
    for d in range(count):
        sizes[stage_of[d]] += 1
        for e in range(count):
            sums[d, stage_of[e]] += weights[d, e]
    total = 0.0
    devices, targets = np.empty(stages + 1, np.int64), np.empty(stages + 1, np.int64)
    origins = np.empty(stages + 1, np.int64)
    for _ in range(stages):
        gain = _chain(weights, stage_of, sums, sizes, moved, wasted_links, devices, origins, targets)
        if gain <= 0:
            break
        total += gain
    return total


@compiled
def _chain(
    weights: Floats, stage_of: Integers, sums: Floats, sizes: Floats, moved: Flags, wasted_links: bool,
    devices: Integers, origins: Integers, targets: Integers,
) -> float:  # fmt: skip
    """One chain; its gain, and 0 when it was taken back."""
    stages = sizes.size
    open_groups = np.ones(stages, np.bool_)
    gain, device, target = -np.inf, -1, -1
    for group in range(stages):
        found, d, t = _best_move(weights, stage_of, sums, sizes, moved, wasted_links, group, open_groups)
        if found > gain:
            gain, device, target = found, d, t
    if device < 0:
        return 0.0
    home = stage_of[device]
    only_home = np.zeros(stages, np.bool_)
    only_home[home] = True
    reached, best, kept, closing, made = 0.0, 0.0, 0, -1, 0
    while True:
        origins[made], devices[made], targets[made] = stage_of[device], device, target
        made += 1
        reached += gain
        _move(weights, stage_of, sums, sizes, device, target)
        moved[device] = True
        if target == home:
            if reached > best:
                best, kept, closing = reached, made, -1
            break
        back, d, _ = _best_move(weights, stage_of, sums, sizes, moved, wasted_links, target, only_home)
        if d >= 0 and reached + back > best:
            best, kept, closing = reached + back, made, d
        open_groups[target] = False
        gain, device, target = _best_move(
            weights, stage_of, sums, sizes, moved, wasted_links, target, open_groups
        )
        if device < 0:
            break
    for step in range(made - 1, kept - 1, -1):
        _move(weights, stage_of, sums, sizes, devices[step], origins[step])
        moved[devices[step]] = False
    if kept and closing >= 0:
        _move(weights, stage_of, sums, sizes, closing, home)
        moved[closing] = True
    return best


@compiled
def _move(weights: Floats, stage_of: Integers, sums: Floats, sizes: Floats, device: int, target: int) -> None:
    origin = stage_of[device]
    for d in range(stage_of.size):
        sums[d, origin] -= weights[d, device]
        sums[d, target] += weights[d, device]
    sizes[origin] -= 1
    sizes[target] += 1
    stage_of[device] = target


@compiled
def _best_move(
    weights: Floats, stage_of: Integers, sums: Floats, sizes: Floats, moved: Flags, wasted_links: bool,
    group: int, targets: Flags,
) -> tuple[float, int, int]:  # fmt: skip
    """The best gain of a move out of `group`, its device and target; device −1 when there is none."""
    gain, device, target = -np.inf, -1, -1
    fastest, candidate = np.inf, -1
    for d in range(stage_of.size):
        if stage_of[d] != group or moved[d]:
            continue
        if wasted_links:
            for e in range(stage_of.size):
                if e != d and stage_of[e] == group and weights[d, e] < fastest:
                    fastest, candidate = weights[d, e], d
            continue
        for t in range(sizes.size):
            if t != group and targets[t] and sums[d, group] - sums[d, t] > gain:
                gain, device, target = sums[d, group] - sums[d, t], d, t
    if wasted_links and candidate >= 0:
        for t in range(sizes.size):
            if t != group and targets[t]:
                found = sums[candidate, t] / sizes[t] - fastest
                if found > gain:
                    gain, device, target = found, candidate, t
    return gain, device, target
