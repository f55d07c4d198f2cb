"""A node that is killed within a round and started again loses nothing of what it had saved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from tests.copied_state import copied_state
from tests.swarm.micro import events_of, micro_swarm, run_swarm, step_of, until

K = 5
STEPS = 3 * K


async def life(folder: Path, kills: list[int]) -> SimulatedSwarm:
    """One node that trains to the end of the run and is killed, just saved, after each of the steps `kills`."""
    swarm: SimulatedSwarm = micro_swarm(
        stages=1, directory=folder, inner__total_steps=STEPS, outer__inner_steps=K, outer__window=0.0
    )
    await swarm.start(1)
    for step in kills:
        await until(lambda step=step: step_of(swarm.nodes[0]) >= step, step=0.001)  # type: ignore[misc]
        assert step_of(swarm.nodes[0]) == step
        await swarm.nodes[0].checkpoints.save()
        swarm.kill(0)
        await asyncio.sleep(20.0)
        swarm.add(0, stage=0)
    await swarm.finish()
    return swarm


def result_of(swarm: SimulatedSwarm) -> dict[str, Any]:
    state = copied_state(swarm.nodes[0].replica)
    return {
        "rounds": [(event["round"], event["step"]) for event in events_of(swarm, "round")],
        "counts": (state.step, state.round, state.updates, swarm.nodes[0].context.counters.tokens),
        **state.tensors(),
    }


def test_a_node_killed_at_every_step_of_a_round_ends_the_same_rounds_with_the_same_weights(
    tmp_path: Path,
) -> None:
    whole = result_of(run_swarm(life(tmp_path / "whole", [])))
    assert whole["rounds"] == [(1, K), (2, 2 * K), (3, 3 * K)]
    killed = result_of(run_swarm(life(tmp_path / "killed", list(range(1, 2 * K + 1)))))
    for name, value in whole.items():
        same = torch.equal(killed[name], value) if isinstance(value, torch.Tensor) else killed[name] == value
        assert same, (name, killed[name], value)
