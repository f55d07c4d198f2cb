"""The stages that devices may take, and random placements in which each has one of those."""

from __future__ import annotations

import numpy as np

from bootstrap.lab.placement.kernels import Flags, Integers
from bootstrap.lab.placement.scenario import Scenario
from node.machine.limits import optional
from protocol.errors import ScenarioError

linear_sum_assignment = optional("scipy.optimize", "lab").linear_sum_assignment

DEALT = 256  # devices; above, an assignment takes half a second and is only looked for where it matters


def fitting(scenario: Scenario, stages: int) -> Flags:
    """Tell which devices fit which stage [N, S]. Raises `ScenarioError` for one that has the memory for none."""
    needed = np.array(scenario.stage_memory or (0.0,))
    if len(needed) not in (1, stages):
        raise ScenarioError(
            f"stage_memory_bytes has {len(needed)} entries: give one, or one for each of {stages}."
        )
    held = np.full(scenario.devices, np.inf) if scenario.memory is None else scenario.memory
    fits: Flags = held[:, None] >= np.broadcast_to(needed, stages)
    for device, allowed in enumerate(scenario.may_serve):
        if max(allowed) >= stages:
            raise ScenarioError(
                f"may_serve[{device}] names stage {max(allowed)}, but there are {stages} stages."
            )
        fits[device, [stage for stage in range(stages) if stage not in allowed]] = False
    for device in np.flatnonzero(~fits.any(1))[:1]:
        raise ScenarioError(
            f"memory_bytes[{device}] is too small for any stage: use more stages, or leave it out."
        )
    return fits


def seated(sizes: Integers, fits: Flags, generator: np.random.Generator) -> Integers | None:
    """Random stages [N] that fit and fill `sizes` [S]; −1 for devices left over. None when that cannot be."""
    seats = np.repeat(np.arange(len(sizes)), sizes)
    order = generator.permutation(len(fits))  # equal costs are dealt out by place
    if len(fits) > DEALT and fits.all() and len(seats) <= len(fits):
        stage_of = np.full(len(fits), -1)
        stage_of[order[: len(seats)]] = seats
        return stage_of
    costs = np.where(fits[order][:, seats], generator.random((len(fits), len(seats))), np.inf)
    try:
        devices, chosen = linear_sum_assignment(costs)
    except ValueError:
        return None
    stage_of = np.full(len(fits), -1)
    stage_of[order[devices]] = seats[chosen]
    return stage_of
