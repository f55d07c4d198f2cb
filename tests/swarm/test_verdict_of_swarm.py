"""What a visitor says of real nodes under the virtual clock, when something is wrong with their swarm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

import node.context
from bootstrap.inspect.observer import Observer
from bootstrap.inspect.seen import Finding, Seen
from bootstrap.inspect.verdict import verdict
from bootstrap.lab.simulation.swarm import WORK_SECONDS, SimulatedSwarm
from node.model.compute import Priority
from node.state.checkpoints import LEAST_SECONDS
from node.storage.checkpoint_files import Checkpoint
from node.storage.state_directory import StateDirectory
from protocol.errors import StateError
from tests.swarm.micro import FOREVER, numbers_of_stage, observer_of, run_swarm, stage_nodes, training, until


async def said_by(visitor: Observer) -> dict[str, Finding]:
    sightings = await visitor.look()
    return {found.kind: found for found in verdict(Seen(visitor.manifest.stages, sightings, version="0.1.0"))}


async def leave_at_once(swarm: SimulatedSwarm) -> None:
    for number in list(swarm.nodes):
        swarm.kill(number)
    await swarm.leave()


def test_a_stage_that_loses_its_replicas_one_by_one_and_gets_one_back() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        visitor = await observer_of(swarm)
        assert {"learning", "training"} & set(await said_by(visitor))
        first, second = numbers_of_stage(swarm, 1)
        swarm.kill(first)
        assert (await said_by(visitor))["one-replica"].sentence == "stage 1 has only one replica"
        swarm.kill(second)
        await asyncio.sleep(32.0)
        found = (await said_by(visitor))["stage-empty"]
        assert found.stage == 1
        seconds = int(found.sentence.removeprefix("stage 1: nobody for ").partition(" s")[0])
        assert 25 <= seconds <= 32
        assert found.sentence.endswith("training stands still")
        swarm.add(9, stage=1)
        await until(lambda: any(event["event"] == "peer-again" for event in swarm.events))
        assert await is_said(visitor, "stage-empty", present=False)
        await leave_at_once(swarm)

    run_swarm(main())


@pytest.mark.long
def test_a_stage_of_slow_machines_is_named() -> None:
    def takes(stage: int, priority: Priority) -> float:
        return WORK_SECONDS[priority] * (20 if stage == 1 else 1)

    async def main() -> None:
        swarm = await training(2, step=0, inner__total_steps=FOREVER, stages=3, model__layers=3)
        swarm.seconds = takes
        await asyncio.sleep(120.0)
        found = (await said_by(await observer_of(swarm)))["slow-stage"]
        assert found.sentence.startswith("everyone waits for stage 1, which is slow")
        await leave_at_once(swarm)

    run_swarm(main())


def test_replicas_that_are_too_far_apart() -> None:
    """Each has gone another way, whatever its partners pulled."""

    async def main() -> None:
        swarm = await training(3, step=20, inner__total_steps=FOREVER)
        visitor = await observer_of(swarm)
        assert "spread" not in await said_by(visitor)
        for place, member in enumerate(stage_nodes(swarm, 1)):
            noise = torch.randn(member.replica.parameters, generator=torch.Generator().manual_seed(place))
            with torch.no_grad():
                member.replica.phi += 0.3 * noise
                member.replica.flat.values += 0.3 * noise
        assert await is_said(visitor, "spread")
        await leave_at_once(swarm)

    run_swarm(main())


@pytest.mark.long
def test_a_loss_that_rises_as_the_learning_rate_does() -> None:
    async def main() -> None:
        swarm = await training(
            2, inner__total_steps=FOREVER, inner__warmup_steps=100, inner__learning_rate=2.0
        )
        assert await is_said(await observer_of(swarm), "loss-rises")
        await leave_at_once(swarm)

    run_swarm(main())


async def is_said(visitor: Observer, kind: str, seconds: float = 40.0, present: bool = True) -> bool:
    """Whether it is, or is no more, within so many seconds."""
    for _ in range(int(seconds)):
        if (kind in await said_by(visitor)) is present:
            return True
        await asyncio.sleep(1.0)
    return False


def test_nodes_of_an_older_version_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        monkeypatch.setattr(node.context, "own_version", lambda: "0.0.9")
        found = (await said_by(await observer_of(swarm)))["old-version"]
        assert found.sentence == "2 nodes run version 0.0.9, older than 0.1.0: ask for an upgrade"
        await leave_at_once(swarm)

    run_swarm(main())


def test_a_clock_that_is_wrong() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        visitor = await observer_of(swarm)
        assert "clock" not in await said_by(visitor)
        swarm.network.skew(stage_nodes(swarm, 1)[0].transport.peer_id, -41.0)
        found = (await said_by(visitor))["clock"]
        assert found.sentence == (
            "the clock of 1 node is 41 s behind the others': switch on time synchronisation there"
        )
        await leave_at_once(swarm)

    run_swarm(main())


def test_a_disk_that_is_full_until_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = StateDirectory.save_checkpoint

    def full(self: StateDirectory, run: str, checkpoint: Checkpoint) -> None:
        raise StateError("Cannot write the checkpoint (No space left on device).")

    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        visitor = await observer_of(swarm)
        monkeypatch.setattr(StateDirectory, "save_checkpoint", full)
        await asyncio.sleep(2 * LEAST_SECONDS)
        assert (await said_by(visitor))["no-disk"].sentence.startswith(
            "4 nodes cannot write their checkpoints"
        )
        monkeypatch.setattr(StateDirectory, "save_checkpoint", write)
        await asyncio.sleep(2 * LEAST_SECONDS)
        assert "no-disk" not in await said_by(visitor)
        await leave_at_once(swarm)

    run_swarm(main())
