"""Tied embeddings in several stages: microbatches go around a ring, and it is one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.evaluation.measuring import MeasuredText, checkpoint_loss, evaluate_route, held_out_text
from bootstrap.export.exporting import export
from bootstrap.export.order import ExportOrder
from bootstrap.export.tokenizer import tokenizer_of_run
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership.discovery import LONELY_SECONDS
from node.model.flat import layout
from node.model.stage import parameter_shapes
from node.pipeline.pipeline import Pipeline
from protocol.codecs.codec import encode
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages.training import Gradient, Return
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import (
    FOREVER,
    assert_exact_admission,
    events_of,
    everyone_goes_on,
    guest_of,
    mean_losses,
    micro_swarm,
    numbers_of_stage,
    observer_of,
    peer_of,
    run_swarm,
    stage_nodes,
    trained,
    training,
    until,
)

TIED: dict[str, Any] = {"model__tied_embeddings": True, "model__layers": 3}
# clipping and the ends of rounds are per stage, and would tell one stage from several
UNCLIPPED = {**TIED, "inner__clip_norm": 1e9, "inner__total_steps": 12, "outer__method": "local"}


def whole_theta(swarm: SimulatedSwarm) -> dict[str, torch.Tensor]:
    """The fast weights of the first replica of every stage, under their names in a checkpoint."""
    weights = {}
    for stage in range(swarm.manifest.stages):
        node = stage_nodes(swarm, stage)[0]
        for place in layout(parameter_shapes(swarm.manifest, stage)):
            weights[place.name] = place.of(node.replica.flat.values).clone()
    return weights


def text_of(swarm: SimulatedSwarm) -> MeasuredText:
    return held_out_text(swarm.manifest, swarm.corpus, 16, tokenizer_of_run(swarm.manifest, None))


def test_the_last_stage_soon_sees_who_comes_to_the_first_one() -> None:
    """It looks for the stage that its microbatches go to while nobody is there."""

    async def main() -> None:
        swarm = micro_swarm(limits__record_lifetime=60.0, **TIED)
        await swarm.seed_peer.start()
        last = swarm.add(0, stage=1)
        await until(lambda: last.public_state == "serving")
        first = swarm.add(1, stage=0)
        await until(lambda: first.public_state == "serving")
        await until(lambda: bool(last.view.members(0, last.transport.now())), seconds=LONELY_SECONDS + 0.5)
        (seen,) = last.view.members(0, last.transport.now())
        assert seen.peer == peer_of(first)

    run_swarm(main())


@pytest.mark.parametrize("stages", [2, 3])
def test_a_ring_trains_the_very_weights_that_one_stage_trains(stages: int) -> None:
    async def main(count: int) -> dict[str, torch.Tensor]:
        swarm = await trained(1, stages=count, **UNCLIPPED)
        return whole_theta(swarm)

    whole, ring = run_swarm(main(1)), run_swarm(main(stages))
    assert set(whole) == set(ring)
    assert "lm_head.weight" not in ring
    for name, weight in whole.items():
        assert torch.allclose(weight, ring[name], atol=2e-6), name


@pytest.mark.long
def test_replicas_of_a_ring_learn_and_are_exported_with_their_own_loss(tmp_path: Path) -> None:
    async def main() -> tuple[SimulatedSwarm, float]:
        swarm = micro_swarm(stages=2, inner__total_steps=60, **TIED)
        await swarm.start(2)
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        assert_exact_admission(swarm)
        observer = await observer_of(swarm)
        route = (await observer.routes())[0]
        own = await evaluate_route(observer, text_of(swarm), route)
        await export(observer, ExportOrder(tmp_path / "model", route=route))
        await observer.rpc.close()
        await swarm.finish()
        return swarm, own.nats

    swarm, own = run_swarm(main())
    assert checkpoint_loss(tmp_path / "model", text_of(swarm)).nats == pytest.approx(own, abs=1e-4)
    before, after = mean_losses(swarm, 8, 8)
    assert after < before - 0.5


def test_activations_come_back_to_the_peer_that_drew_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[tuple[PeerId, str]] = []
    on_return = Pipeline.on_return

    async def noted(self: Pipeline, request: Request[Return]) -> Answer[Gradient]:
        came.append((self._context.me, request.message.home))
        return await on_return(self, request)

    monkeypatch.setattr(Pipeline, "on_return", noted)

    async def main() -> None:
        swarm = await trained(2, stages=2, inner__total_steps=3, inner__warmup_steps=1, **TIED)
        assert {place for place, _ in came} == {home for _, home in came}
        assert len({place for place, _ in came}) == 2
        assert all(place == home for place, home in came)
        assert not events_of(swarm, "resend")

    run_swarm(main())


def test_the_first_stage_learns_nothing_from_sequences_of_a_home_that_has_died() -> None:
    """Alone, it has no gradients but those of what it answers."""

    async def main() -> None:
        swarm = micro_swarm(stages=2, **TIED)
        await swarm.seed_peer.start()
        node = swarm.add(0, stage=0)
        await until(lambda: node.public_state == "serving")
        guest = await guest_of(swarm, stage=1)
        parcel = [
            encode(torch.randn(2, 32, 16), "fp32"),
            encode(torch.zeros(2, 32, dtype=torch.int32), "int32"),
        ]
        message = Return(microbatch="a", home=Identity.from_seed("somebody else").peer_id, draw="1-0-x")
        _, [gradient] = await guest.call(peer_of(node), message, parcel, deadline=5)
        assert bool(gradient.any())
        assert not bool(node.replica.flat.gradients.any())
        await guest.close()
        await swarm.leave()

    run_swarm(main())


def test_the_first_stage_answers_for_a_home_that_has_died() -> None:
    async def main() -> None:
        swarm = await training(2, stages=2, inner__total_steps=FOREVER, **TIED)
        node = stage_nodes(swarm, 0)[0]
        guest = await guest_of(swarm, stage=1)
        hidden = torch.randn(2, 32, 16)
        parcel = [encode(hidden, "fp32"), encode(torch.zeros(2, 32, dtype=torch.int32), "int32")]
        somebody_else = Identity.from_seed("somebody else").peer_id
        for home in (somebody_else, peer_of(node)):
            message = Return(microbatch=home, home=home, draw="1-0-x")
            reply, tensors = await guest.call(peer_of(node), message, parcel, deadline=5)
            assert reply.loss > 0
            assert tensors[0].shape == hidden.shape
        message = Return(microbatch="another", home=somebody_else, draw="1-0-x")
        with pytest.raises(Refused, match="bad-shape"):
            await guest.call(peer_of(node), message, parcel[:1], deadline=5)
        await guest.close()
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long_but("1")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_ring_goes_on_when_a_replica_dies_and_another_comes(stage: int) -> None:
    async def main() -> None:
        swarm = await training(2, stages=3, inner__total_steps=FOREVER, **TIED)
        swarm.kill(numbers_of_stage(swarm, stage)[0])
        await everyone_goes_on(swarm, 15)
        old = list(swarm.nodes.values())
        swarm.add(77, stage=stage)
        await everyone_goes_on(swarm, 15)
        assert_exact_admission(swarm, old)
        await swarm.leave()

    run_swarm(main())
