"""Every inner step of every replica counts exactly a batch, whoever sends and whoever dies."""

from __future__ import annotations

import asyncio

import pytest
import torch

from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.process.daemon import Node
from protocol.codecs.codec import encode
from protocol.errors import Refused
from protocol.messages.training import Forward
from protocol.rpc.rpc import Rpc
from tests.swarm.micro import (
    FOREVER,
    assert_exact_admission,
    events_of,
    everyone_goes_on,
    guest_of,
    micro_swarm,
    peer_of,
    run_swarm,
    trained,
    training,
    until,
)


@pytest.mark.long
def test_each_step_takes_exactly_its_batch_also_when_streams_break() -> None:
    faulty = Link(latency=0.01, jitter=0.01, open_loss=0.02, write_loss=0.02)
    swarm = run_swarm(trained(3, link=faulty, stages=3, model__layers=3))
    assert events_of(swarm, "resend")
    assert_exact_admission(swarm)


def microbatch(node: Node, seed: int = 0) -> list[torch.Tensor]:
    """Activations and labels that the node's stage accepts."""
    manifest = node.context.manifest
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 256, shape, generator=generator, dtype=torch.int32)
    return [torch.randn(*shape, manifest.model.hidden_size, generator=generator), labels]


async def forward(
    guest: Rpc, node: Node, tensors: list[torch.Tensor], name: str = "m", stage: int | None = None
) -> torch.Tensor:
    """Send a microbatch; returns the gradient."""
    parcel = [encode(tensor, "fp32" if tensor.is_floating_point() else "int32") for tensor in tensors]
    message = Forward(microbatch=name, stage=node.context.stage if stage is None else stage)
    _, [gradient] = await guest.call(peer_of(node), message, parcel, deadline=30.0)
    return gradient


async def a_last_stage_node_of_its_own() -> tuple[SimulatedSwarm, Node, Rpc]:
    """A stage-1 replica that no stage-0 peer feeds, and a guest to do that."""
    swarm: SimulatedSwarm = micro_swarm()
    await swarm.seed_peer.start()
    node = swarm.add(0, stage=1)
    await until(lambda: node.public_state == "serving")
    return swarm, node, await guest_of(swarm, stage=0)


def test_a_repeated_delivery_gets_the_same_gradient_and_counts_once() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        tensors = microbatch(node)
        at_once = await asyncio.gather(*(forward(guest, node, tensors) for _ in range(3)))
        later = await forward(guest, node, tensors)
        assert all(torch.equal(gradient, later) for gradient in at_once)
        assert node.context.counters.received == 1
        await forward(guest, node, tensors, name="another")
        await until(lambda: node.replica.step == 1)
        assert torch.equal(await forward(guest, node, tensors), later)  # also after the step
        assert (node.replica.step, node.context.counters.received) == (1, 2)
        await swarm.leave()

    run_swarm(main())


def test_the_same_id_from_two_peers_is_two_microbatches() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        other = await guest_of(swarm, "another guest", stage=0)
        await asyncio.gather(forward(guest, node, microbatch(node)), forward(other, node, microbatch(node)))
        assert node.context.counters.received == 2
        await swarm.leave()

    run_swarm(main())


def damaged(tensors: list[torch.Tensor], damage: str) -> list[torch.Tensor]:
    activations, labels = (tensor.clone() for tensor in tensors)
    if damage == "nan":
        activations[0, 0, 0] = float("nan")
    if damage == "infinite":
        activations[0, 0, 0] = float("inf")
    if damage == "beyond the vocabulary":
        labels[0, 0] = 256
    if damage == "negative token":
        labels[0, 0] = -100
    return {
        "other hidden size": [activations[..., :-1].contiguous(), labels],
        "other length": [activations[:, :-1].contiguous(), labels[:, :-1].contiguous()],
        "labels of another batch": [activations, labels[:-1]],
        "no sequences": [activations[:0], labels[:0]],
        "no labels": [activations],
        "scalar labels": [activations, torch.tensor(3, dtype=torch.int32)],
        "float labels": [activations, labels.float()],
    }.get(damage, [activations, labels])


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("nan", "non-finite"),
        ("infinite", "non-finite"),
        ("beyond the vocabulary", "bad-shape"),
        ("negative token", "bad-shape"),
        ("other hidden size", "bad-shape"),
        ("other length", "bad-shape"),
        ("labels of another batch", "bad-shape"),
        ("no sequences", "bad-shape"),
        ("no labels", "bad-shape"),
        ("scalar labels", "bad-shape"),
        ("float labels", "bad-shape"),
    ],
)
def test_a_malformed_microbatch_is_refused_and_leaves_no_trace(damage: str, code: str) -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        good = microbatch(node)
        with pytest.raises(Refused) as refusal:
            await forward(guest, node, damaged(good, damage))
        assert refusal.value.code == code
        assert node.context.counters.received == 0
        assert not node.replica.flat.gradients.any()
        for number in range(2):  # and the step has room for exactly its batch still
            await forward(guest, node, good, name=str(number))
        await until(lambda: node.replica.step == 1)
        await swarm.leave()

    run_swarm(main())


def test_nobody_but_stage_0_itself_decides_what_stage_0_trains_on() -> None:
    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        node = swarm.nodes[0]
        guest = await guest_of(swarm, stage=1)
        tokens = microbatch(node)[1]
        for number in range(20):
            with pytest.raises(Refused):
                await forward(guest, node, [tokens, tokens], name=str(number))
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_a_microbatch_for_another_stage_is_refused() -> None:
    async def main() -> None:
        swarm, node, guest = await a_last_stage_node_of_its_own()
        with pytest.raises(Refused, match="serves stage 1"):
            await forward(guest, node, microbatch(node), stage=7)
        await swarm.leave()

    run_swarm(main())


def test_one_id_of_two_senders_stays_two_microbatches_at_every_later_stage() -> None:
    """Failed before: of the way that it had come an id kept the last 64 characters, here none of the sender."""

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm(stages=3, model__layers=3)
        await swarm.seed_peer.start()
        middle, last = swarm.add(0, stage=1), swarm.add(1, stage=2)
        await until(lambda: middle.public_state == last.public_state == "serving")
        await until(lambda: bool(middle.view.serving(2, middle.transport.now())))
        name = "3-1-0123abcd".rjust(64, "x")
        guests = [await guest_of(swarm, stage=0), await guest_of(swarm, "another guest", stage=0)]
        gradients = await asyncio.gather(
            *(forward(guest, middle, microbatch(middle, seed), name) for seed, guest in enumerate(guests))
        )
        assert last.context.counters.received == 2
        assert not torch.equal(*gradients)
        await swarm.leave()

    run_swarm(main())
