"""A pair of replicas that is stopped and started again at any inner step goes on as if it never had been.

With real checkpoint files, real inner steps and real exchanges; the outer step of every overlap and codec.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from node.model.replica import Replica
from node.state.checkpoints import Checkpoints
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from tests.copied_state import copied_state
from tests.swarm.micro import micro_batch, run_swarm
from tests.unit.two_ends import End, agree, two_ends

K = 3
STEPS = 3 * K
DROPPED = 1  # the step whose gradient is not finite
CASES: list[dict[str, Any]] = [
    {"outer__overlap": "none"},
    {"outer__overlap": "none", "wire__gossip": "int8"},
    {"outer__overlap": "phi-early", "wire__progress": "int8"},
    {"outer__overlap": "phi-early", "wire__progress": "bf16"},
]


def learn(replica: Replica, seed: int, is_dropped: bool = False) -> None:
    """One inner step."""
    inner, data = replica.manifest.inner, replica.manifest.data
    replica.passes.last_stage(*micro_batch(seed, inner.sequences, data.sequence_tokens))
    if is_dropped:
        replica.flat.gradients[3] = math.inf
    replica.inner_step(1)


def checkpoints_of(end: End, folder: Path) -> tuple[Checkpoints, StateDirectory]:
    directory = StateDirectory(folder / str(end.me))
    directory.path.mkdir(exist_ok=True)
    return Checkpoints(end.context, end.replica, directory), directory


async def started_again(ends: tuple[End, End], folder: Path, settings: dict[str, Any]) -> tuple[End, End]:
    for end in ends:
        await checkpoints_of(end, folder)[0].save()
        await end.close()
    after = await two_ends(**settings)
    for end in after:
        checkpoints, directory = checkpoints_of(end, folder)
        saved = directory.checkpoint(end.context.run_id)
        assert saved is not None
        await checkpoints.restore(saved)
    return after


async def life(folder: Path, settings: dict[str, Any], restart: int | None) -> list[StageState]:
    settings = {"outer__inner_steps": K, **settings}
    a, b = await two_ends(**settings)
    for step in range(STEPS):
        for side, end in enumerate((a, b)):
            learn(end.replica, 10 * step + side, is_dropped=step == DROPPED)
        if step == restart:
            a, b = await started_again((a, b), folder, settings)
        if step % K == 0 or step == restart:
            agree(a, b, f"round {step // K}")
        if (step + 1) % K == 0:
            await asyncio.gather(a.rounds.finish(), b.rounds.finish())
    assert all(len(end.pulls) for end in (a, b))  # the last round at least was one of both
    states = [copied_state(a.replica), copied_state(b.replica)]
    await asyncio.gather(a.close(), b.close())
    return states


@pytest.mark.long
@pytest.mark.parametrize("settings", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_pair_started_again_at_any_step_of_a_round_has_the_trajectory_of_one_that_never_was(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = run_swarm(life(tmp_path, settings, None))
    assert whole[0].round == STEPS // K
    assert (whole[0].step, whole[0].updates) == (STEPS, STEPS - 1)
    for restart in range(STEPS):
        for mine, others in zip(run_swarm(life(tmp_path, settings, restart)), whole, strict=True):
            assert (mine.step, mine.round, mine.updates) == (others.step, others.round, others.updates)
            assert mine.tensors().keys() == others.tensors().keys()
            for name, tensor in mine.tensors().items():
                assert torch.equal(tensor, others.tensors()[name]), (restart, name)
