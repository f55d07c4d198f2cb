"""Gradients and weights that are not finite, from a node's own device: told, never passed on, and mended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.fragment import Fragment, PairPull
from node.model.replica import Replica
from node.watch.events import Events, JsonLines
from protocol.errors import NodeFailed
from tests.swarm.micro import (
    FOREVER,
    assert_exact_admission,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    run_swarm,
    training,
    until,
)


class Overflows(Replica):
    """Every other gradient is infinite."""

    def inner_step(self, microbatches: int) -> Any:
        if self.step % 2:
            self.flat.gradients[3] = math.inf
        return super().inner_step(microbatches)


def test_an_infinite_gradient_is_told_once_and_is_no_number_in_any_event(tmp_path: Path) -> None:
    async def main() -> SimulatedSwarm:
        swarm: SimulatedSwarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(4):
            swarm.add(number, stage=number % 2, replica=Overflows if number == 1 else Replica)
        await everyone_reaches(swarm, 20)
        replica = swarm.nodes[1].replica
        assert replica.optimizer.updates in (replica.step // 2, -(-replica.step // 2))
        assert_exact_admission(swarm)
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    dropped = [event for event in events_of(swarm, "step", node=1) if event["left_out"]]
    assert len(dropped) >= 9
    assert {event["gradient_norm"] for event in dropped} == {None}
    assert not [event for event in events_of(swarm, "step") if event["left_out"] and event["node"] != 1]
    seconds = swarm.events[-1]["time"] - swarm.events[0]["time"]
    assert len(events_of(swarm, "step-left-out")) <= 1 + seconds // 60
    json.dumps(swarm.events, allow_nan=False)


def test_no_event_holds_what_json_has_no_word_for(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "events.jsonl")
    Events(lambda: 0.0, lines).emit("bad", loss=math.nan, nested={"rates": [1.0, -math.inf]}, name="inf")
    lines.close()
    text = (tmp_path / "events.jsonl").read_text()
    event = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (event["loss"], event["nested"], event["name"]) == (None, {"rates": [1.0, None]}, "inf")


@pytest.mark.parametrize("what", ["phi", "delta", "moment"])
def test_weights_that_are_no_numbers_are_replaced_by_those_of_others(what: str) -> None:
    async def main() -> None:
        swarm = await training(2, step=6, inner__total_steps=FOREVER)
        replica = swarm.nodes[1].replica
        {"phi": replica.phi, "delta": replica.delta, "moment": replica.optimizer.moments[0]}[what][7] = (
            math.nan
        )
        await until(lambda: bool(events_of(swarm, "weights-lost")))
        await until(lambda: bool(events_of(swarm, "downloaded", node=1)))
        await everyone_goes_on(swarm, 20)
        assert len(events_of(swarm, "weights-lost")) == 1
        assert all(node.replica.is_finite() for node in swarm.nodes.values())
        await swarm.leave()

    run_swarm(main())


def test_a_lone_replica_takes_its_last_checkpoint_which_bad_weights_never_overwrite(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(1, step=6, stages=1, directory=tmp_path, inner__total_steps=FOREVER)
        node = swarm.nodes[0]
        await node.checkpoints.save()
        node.replica.delta[7] = math.inf
        with pytest.raises(Exception, match="not saved"):
            await node.checkpoints.save()
        await until(lambda: bool(events_of(swarm, "weights-replaced")))
        await everyone_goes_on(swarm, 20)
        assert node.replica.is_finite()
        assert len(events_of(swarm, "weights-lost")) == 1
        await swarm.leave()

    run_swarm(main())


def test_without_any_good_copy_the_node_ends_with_a_sentence() -> None:
    async def main() -> None:
        swarm = await training(1, step=6, stages=1, inner__total_steps=FOREVER)
        swarm.nodes[0].replica.phi[7] = math.nan
        await until(lambda: swarm.tasks[0].done())
        with pytest.raises(NodeFailed, match="neither another replica nor a checkpoint"):
            swarm.tasks.pop(0).result()
        swarm.nodes.pop(0)
        await swarm.leave()

    run_swarm(main())


class NeverFinite(Replica):
    def finish_round_alone(self, own: Fragment) -> None:
        super().finish_round_alone(own)
        self.delta[0] = torch.nan

    def finish_round_with(self, own: Fragment, pull: PairPull) -> None:
        super().finish_round_with(own, pull)
        self.delta[0] = torch.nan


@pytest.mark.long
def test_a_device_that_spoils_every_copy_ends_its_node_and_no_other() -> None:
    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(4):
            swarm.add(number, stage=number % 2, replica=NeverFinite if number == 1 else Replica)
        await until(lambda: swarm.tasks[1].done(), seconds=300)
        with pytest.raises(NodeFailed, match="again right after"):
            swarm.tasks.pop(1).result()
        swarm.nodes.pop(1)
        await everyone_goes_on(swarm, 10)
        assert all(node.replica.is_finite() for node in swarm.nodes.values())
        await swarm.leave()

    run_swarm(main())
