"""One replica answers what nobody may: the others go on, it is left alone, and newcomers and visitors are served."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bootstrap.inspect.observer import Observer, sampled_spreads
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.process.daemon import Node
from protocol.codecs.codec import Encoded, as_read, encode
from protocol.messages.state import GetStateIndex, GetStatePiece, GetStateSample, StateIndex
from protocol.messages.training import Forward
from protocol.rpc.rpc import Answer, Request, Traffic
from tests.swarm.micro import (
    FOREVER,
    all_reached,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    observer_of,
    peer_of,
    run_swarm,
    stage_nodes,
    training,
    until,
)
from tests.unit.two_peers import Raw

Tensors = Sequence[Encoded]
Lie = Callable[[dict[str, Any], list[torch.Tensor]], tuple[dict[str, Any], Tensors]]


def says(**fields: Any) -> Lie:
    return lambda body, tensors: ({**body, **fields}, [encode(tensor, "fp32") for tensor in tensors])


def brings(change: Callable[[list[torch.Tensor]], Tensors]) -> Lie:
    return lambda body, tensors: (body, change(tensors))


def each(change: Callable[[torch.Tensor], torch.Tensor], codec: str = "fp32") -> Lie:
    return brings(lambda tensors: [encode(change(tensor), codec) for tensor in tensors])


def spoilt(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


OF_TENSORS: dict[str, Lie] = {
    "int64": each(lambda tensor: tensor.long(), "int64"),
    "int32": each(lambda tensor: tensor.int(), "int32"),
    "no numbers": each(spoilt(math.nan)),
    "infinity": each(spoilt(-math.inf)),
    "as large as can be": each(spoilt(3e38)),
    "one number": each(lambda tensor: tensor.sum()),
    "nothing in it": each(lambda tensor: tensor.flatten()[:0]),
    "one dimension more": each(lambda tensor: tensor[None]),
    "turned": each(lambda tensor: tensor.movedim(0, -1)[..., :-1].contiguous()),
    "none": brings(lambda tensors: []),
    "two": brings(lambda tensors: [encode(tensor, "fp32") for tensor in (*tensors, tensors[0])]),
}
OF_GRADIENTS: dict[str, Lie] = OF_TENSORS | {
    "a loss of 1e308": says(loss=1e308),
    "a loss of NaN": says(loss=math.nan),
    "a loss below nothing": says(loss=-1e308),
    "text for a loss": says(loss="1"),
    "seconds of 1e308": says(seconds=1e308),
    "seconds below nothing": says(seconds=-1e308),
    "an endless queue": says(queue=2**63 - 1),
    "more steps than there is time": says(step=2**63 - 1),
}


def lies(node: Node, lie: Lie, traffic: Traffic, *kinds: Any) -> None:
    """Let a node answer these requests as it would, and change that."""
    rpc = node.context.rpc
    for kind in kinds:
        honest = rpc._handlers[traffic, kind.kind].answer

        async def answer(request: Request[Any], honest: Any = honest) -> Answer[Any]:
            told = await honest(request)
            sent = list(told.tensors)
            body, tensors = lie(told.message.model_dump(), [as_read(encoded).float() for encoded in sent])
            return Answer[Any](Raw(told.message.kind, body), tensors)  # type: ignore[arg-type]

        rpc.handle(kind.answered_by(answer))


@pytest.mark.long_but("int64", "a loss of 1e308")
@pytest.mark.parametrize("lie", OF_GRADIENTS)
def test_a_next_stage_that_answers_nonsense_ends_nobody_and_is_left_alone(lie: str) -> None:
    """Failed before for "a loss of 1e308" and "int64": every node of the stage before ended."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        liar, honest = stage_nodes(swarm, 1)
        lies(liar, OF_GRADIENTS[lie], Traffic.PIPELINE, Forward)
        before = stage_nodes(swarm, 0)
        await until(lambda: all(has_left_alone(node, liar) for node in before))
        goal = max(node.replica.step for node in (*before, honest)) + 10
        await until(lambda: all_reached((*before, honest), goal))
        assert not any(task.done() for task in swarm.tasks.values())
        named = [(event["node"], event["peer"]) for event in events_of(swarm, "left-alone")]
        assert sorted(named) == sorted((n, peer_of(liar)) for n in swarm.nodes if swarm.nodes[n] in before)
        for node in before:
            assert node.context.counters.loss is not None
            assert node.context.counters.loss < 10
            assert not has_left_alone(node, honest)
        await swarm.leave()

    run_swarm(main())


def has_left_alone(node: Node, other: Node) -> bool:
    return node.context.view.ledger.is_quarantined(peer_of(other), node.context.view.elapsed())


OF_STATES: dict[str, Lie] = OF_TENSORS | {
    "a step of 1e18": says(step=10**18),
    "a step below zero": says(step=-1),
    "a digest of nothing": says(digest=b""),
}


@pytest.mark.long_but("int64")
@pytest.mark.parametrize("lie", OF_STATES)
def test_a_donor_of_nonsense_ends_no_newcomer(lie: str) -> None:
    """Failed before for "int64": the newcomer ended, and whoever asked that donor again."""

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm(stages=1, inner__total_steps=FOREVER)
        await swarm.start(3)
        await everyone_reaches(swarm, 8)
        lies(swarm.nodes[0], OF_STATES[lie], Traffic.STATE, GetStatePiece, GetStateSample)
        swarm.add(9, stage=0)
        await until(lambda: bool(events_of(swarm, "downloaded", 9)))
        await everyone_goes_on(swarm, 10)
        assert not any(task.done() for task in swarm.tasks.values())
        await swarm.leave()

    run_swarm(main())


WRONG_INDEX = {
    f"{field} {value}": (field, value)
    for field in ("parameters", "piece_parameters", "step", "round", "stage")
    for value in (0, 1, 2**62, -1, math.nan)
}


@pytest.mark.long_but("parameters 0", "step 1")
@pytest.mark.parametrize("lie", WRONG_INDEX)
def test_an_index_of_a_state_that_is_none_ends_no_newcomer(lie: str) -> None:
    field, value = WRONG_INDEX[lie]

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm(stages=1, inner__total_steps=FOREVER)
        await swarm.start(2)
        await everyone_reaches(swarm, 8)

        async def answer(request: Request[GetStateIndex]) -> Answer[StateIndex]:
            replica = swarm.nodes[1].replica
            body = {"stage": 0, "step": replica.step, "round": replica.round, "parameters": replica.parameters,
                    "piece_parameters": 2**20, field: value}  # fmt: skip
            return Answer[StateIndex](Raw("state-index", body))  # type: ignore[arg-type]

        swarm.nodes[0].context.rpc.handle(GetStateIndex.answered_by(answer))
        swarm.add(9, stage=0)
        await until(lambda: bool(events_of(swarm, "downloaded", 9)))
        await everyone_goes_on(swarm, 5)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long_but("two", "as large as can be")
@pytest.mark.parametrize("lie", OF_TENSORS)
def test_a_sample_that_is_none_ends_no_status(lie: str) -> None:
    """Failed before for "two": `noloco status` ended with a traceback, for everybody."""

    async def main() -> None:
        swarm = await training(3, inner__total_steps=FOREVER)
        lies(stage_nodes(swarm, 1)[0], OF_TENSORS[lie], Traffic.STATE, GetStateSample)
        observer: Observer = await observer_of(swarm)
        await observer.look()
        spreads = await sampled_spreads(observer, random.Random(0))
        assert spreads.keys() == {0, 1}
        assert all(0 <= spread < 1 for spread in spreads.values())
        await swarm.leave()

    run_swarm(main())
