"""The local search of DT-FM's genetic algorithm, by chains of moves.

A chain starts in the group with the best gain, moves one device to its best target, goes on from that target, and
ends when it comes home, so that all sizes are as before; its best prefix, closed by a move home, is kept. With w
the seconds of a macro-batch over a link, one way, and A a device's own group:

- DT-FM: a group's candidate is the device with the fastest link to a group-mate, and gain(d: A → B) = mean over B
  of w_de − min over A of w_de. A fast link inside a group is wasted, since DP waits for the slowest there; between
  two groups the matching can use it.
- Kernighan and Lin: any device may move, gain(d: A → B) = Σ over A of w_de − Σ over B of w_de. It keeps fast links
  inside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bootstrap.lab.placement.kernels import Flags, Floats, Integers, compiled


class Partition(NamedTuple):
    """Groups that chains of moves change in place. `weights` [N, N] is symmetric with a diagonal of 0."""

    weights: Floats
    stage_of: Integers  # [N]
    sums: Floats  # [N, S]: of a device's weights to the members of each group
    sizes: Floats  # [S]
    moved: Flags  # [N]: a device moves at most once in a pass
    wasted_links: bool  # DT-FM's gain, not Kernighan and Lin's


@compiled
def improve(weights: Floats, stage_of: Integers, stages: int, wasted_links: bool) -> float:
    """One pass of chains over `stage_of` [N], in place; returns the gain."""
    count = stage_of.size
    sums, sizes = np.zeros((count, stages)), np.zeros(stages)
    for d in range(count):
        sizes[stage_of[d]] += 1
        for e in range(count):
            sums[d, stage_of[e]] += weights[d, e]
    groups = Partition(weights, stage_of, sums, sizes, np.zeros(count, np.bool_), wasted_links)
    total = 0.0
    for _ in range(stages):
        gain = run_chain(groups)
        if gain <= 0:
            break
        total += gain
    return total


@compiled
def run_chain(groups: Partition) -> float:
    """One chain; its gain, and 0 when it was taken back."""
    stages, stage_of = groups.sizes.size, groups.stage_of
    devices, origins = np.empty(stages + 1, np.int64), np.empty(stages + 1, np.int64)
    open_groups, only_home = np.ones(stages, np.bool_), np.zeros(stages, np.bool_)
    gain, device, target = -np.inf, -1, -1
    for group in range(stages):
        found, d, t = best_move(groups, group, open_groups)
        if found > gain:
            gain, device, target = found, d, t
    if device < 0:
        return 0.0
    home = stage_of[device]
    only_home[home] = True
    reached, best, kept, closing, made = 0.0, 0.0, 0, -1, 0
    while device >= 0:
        origins[made], devices[made] = stage_of[device], device
        made += 1
        reached += gain
        move(groups, device, target)
        if target == home:
            if reached > best:
                best, kept, closing = reached, made, -1
            break
        back, d, _ = best_move(groups, target, only_home)
        if d >= 0 and reached + back > best:
            best, kept, closing = reached + back, made, d
        open_groups[target] = False
        gain, device, target = best_move(groups, target, open_groups)
    for step in range(made - 1, kept - 1, -1):
        move(groups, devices[step], origins[step])
        groups.moved[devices[step]] = False
    if closing >= 0:
        move(groups, closing, home)
    return best


@compiled
def move(groups: Partition, device: int, target: int) -> None:
    origin = groups.stage_of[device]
    for d in range(groups.stage_of.size):
        groups.sums[d, origin] -= groups.weights[d, device]
        groups.sums[d, target] += groups.weights[d, device]
    groups.sizes[origin] -= 1
    groups.sizes[target] += 1
    groups.stage_of[device] = target
    groups.moved[device] = True


@compiled
def best_move(groups: Partition, group: int, targets: Flags) -> tuple[float, int, int]:
    """The best gain of a move out of `group`, its device and target; device −1 when there is none."""
    weights, stage_of, sums = groups.weights, groups.stage_of, groups.sums
    gain, device, target = -np.inf, -1, -1
    fastest, candidate = np.inf, -1
    for d in range(stage_of.size):
        if stage_of[d] != group or groups.moved[d]:
            continue
        if groups.wasted_links:
            for e in range(stage_of.size):
                if e != d and stage_of[e] == group and weights[d, e] < fastest:
                    fastest, candidate = weights[d, e], d
            continue
        for t in range(groups.sizes.size):
            if t != group and targets[t] and sums[d, group] - sums[d, t] > gain:
                gain, device, target = sums[d, group] - sums[d, t], d, t
    if candidate >= 0:
        for t in range(groups.sizes.size):
            if t != group and targets[t]:
                found = sums[candidate, t] / groups.sizes[t] - fastest
                if found > gain:
                    gain, device, target = found, candidate, t
    return gain, device, target
