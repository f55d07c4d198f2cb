"""A node that is asked to rest gives its stage up, loses nothing, and goes on as the peer that it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from datetime import datetime
from pathlib import Path

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.giving.limit_watch import LimitWatch, Senses
from node.giving.line import Line
from node.giving.policy import VolunteerLimits
from node.machine.duty import Duty
from node.machine.hours import Hours
from node.process.daemon import Node
from tests.swarm.micro import (
    FOREVER,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    run_swarm,
    step_of,
    training,
    until,
)


def ask(node: Node) -> None:
    node.rest.ask("volunteer", "you asked for it.")


async def rested(swarm: SimulatedSwarm, number: int) -> float:
    """Ask it to, and wait until it does; how many seconds that took."""
    began = swarm.network.now()
    ask(swarm.nodes[number])
    await until(lambda: bool(events_of(swarm, "paused", node=number)))
    return swarm.network.now() - began


@pytest.mark.parametrize("number", [0, 1])  # of the first and the last stage
@pytest.mark.parametrize("has_directory", [True, False])
def test_it_rests_within_ten_seconds_and_goes_on_where_it_was(
    number: int, has_directory: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        directory = tmp_path if has_directory else None
        swarm = await training(2, directory=directory, inner__total_steps=FOREVER)
        node = swarm.nodes[number]
        peer, stage, replica = node.transport.peer_id, node.stage, weakref.ref(node.replica)
        assert await rested(swarm, number) < 10
        gc.collect()
        assert replica() is None  # nobody holds its memory
        assert (node.stage, node.health()["state"]) == (None, "paused")
        assert node.health()["paused"] == "you asked for it."
        step = step_last_told(swarm, number)
        others = {n: step_of(other) for n, other in swarm.nodes.items() if n != number}
        await until(lambda: all(step_of(swarm.nodes[n]) >= before + 20 for n, before in others.items()))
        for other in swarm.nodes.values():
            if other is not node:
                assert peer not in other.view.serving(stage or 0, other.transport.now())
        node.rest.lift("volunteer")
        await until(lambda: node.stage is not None and node.public_state == "serving")
        assert (node.transport.peer_id, node.stage) == (peer, stage)
        await everyone_goes_on(swarm)
        first = next(e["step"] for e in events_of(swarm, "step", node=number) if e["step"] > step)
        assert first >= step + 1
        await swarm.leave()

    run_swarm(main())


def step_last_told(swarm: SimulatedSwarm, number: int) -> int:
    return int(events_of(swarm, "step", node=number)[-1]["step"])


def test_every_microbatch_of_a_resting_replica_is_trained_on_once() -> None:
    """The only replica of its stage rests again and again; the batches that were begun are all in its steps."""

    async def main() -> None:
        swarm = await training(1, step=3, inner__total_steps=FOREVER)
        node = swarm.nodes[1]
        for _ in range(5):
            received = node.context.counters
            steps = node.replica
            ask(node)
            await until(lambda: node.stage is None)
            assert steps.step  # it is held here alone, to look at what became of it
            assert received.tokens_stepped == received.tokens
            node.rest.lift("volunteer")
            await until(lambda: node.stage is not None and node.public_state == "serving")
            await everyone_goes_on(swarm, 3)
        assert not events_of(swarm, "microbatches-dropped")
        await swarm.leave()

    run_swarm(main())


def test_a_node_that_rests_leaves_and_one_that_has_finished_rests(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = micro_swarm(directory=tmp_path)
        await swarm.start(1)
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        assert await rested(swarm, 1) < 10
        swarm.nodes[1].rest.lift("volunteer")
        await until(lambda: swarm.nodes[1].public_state == "finished")
        await rested(swarm, 0)
        swarm.nodes[0].stop()
        await asyncio.wait_for(swarm.tasks[0], 10)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_it_rests_while_somebody_wants_it_to() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        node = swarm.nodes[1]
        node.rest.ask("limits", "It is day.")
        await rested(swarm, 1)
        assert node.health()["paused"] == "It is day. you asked for it."
        node.rest.lift("volunteer")
        await asyncio.sleep(30)
        assert node.stage is None
        node.rest.lift("limits")
        await everyone_reaches(swarm, 5)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_asked_before_it_has_a_stage_it_rests_as_soon_as_it_can(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = micro_swarm(directory=tmp_path, inner__total_steps=FOREVER)
        await swarm.start(2)
        await asyncio.sleep(0.1)
        ask(swarm.nodes[3])
        await until(lambda: bool(events_of(swarm, "paused", node=3)))
        assert swarm.nodes[3].stage is None
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_outside_of_its_hours_a_node_rests_and_it_joins_within_them(tmp_path: Path) -> None:
    """The wall clock is made up; what the node does by it is real."""
    noon, night = datetime(2026, 11, 24, 12, 0), datetime(2026, 11, 24, 23, 0)
    limits = VolunteerLimits(hours=Hours.parse("22-07"), share=0.5)

    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        node = swarm.nodes[1]
        state = node.surroundings.state
        assert state is not None
        duty, line = Duty(), Line(state, node.transport, night)
        senses = Senses(limits, torch.device("cpu"))
        keeper = LimitWatch(limits, senses, line, duty, node.rest, node.surroundings.events)
        await keeper.look(night)
        assert (node.rest.reason, duty.share) == ("", 0.5)
        await keeper.look(noon)
        await until(lambda: bool(events_of(swarm, "paused", node=1)))
        [paused] = events_of(swarm, "paused", node=1)
        assert paused["reason"] == "It is Tue 12:00, outside of --hours 22-07; they begin on Tue at 22:00."
        await everyone_goes_on_but(swarm, 1)
        await keeper.look(night)
        await until(lambda: node.stage is not None)
        await everyone_goes_on(swarm)

        late = swarm.add(9, stage=1)
        late.rest.ask("limits", paused["reason"])
        await asyncio.sleep(20)
        assert events_of(swarm, "waiting-to-join", node=9)
        assert late.stage is None
        assert not events_of(swarm, "execution", node=9)  # nothing was taken for it
        late.rest.lift("limits")
        await until(lambda: late.public_state == "serving")
        await swarm.leave()

    run_swarm(main())


async def everyone_goes_on_but(swarm: SimulatedSwarm, number: int) -> None:
    others = {n: step_of(node) for n, node in swarm.nodes.items() if n != number}
    await until(lambda: all(step_of(swarm.nodes[n]) >= before + 10 for n, before in others.items()))


@pytest.mark.long
def test_others_are_told_of_a_lower_capacity() -> None:
    async def main() -> None:
        swarm = await training(2, step=10, inner__total_steps=FOREVER)
        node = swarm.nodes[1]
        usual = node.context.throughput.capacity()
        node.context.compute.duty.share = 0.25
        await asyncio.sleep(10)
        [said] = [
            member.announcement.capacity
            for member in swarm.nodes[0].view.members(1, swarm.network.now())
            if member.peer == node.transport.peer_id
        ]
        assert said is not None
        assert usual is not None
        assert said == pytest.approx(usual / 4, rel=0.3)
        await swarm.leave()

    run_swarm(main())
