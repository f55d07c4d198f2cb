"""What floods cost a stage that trains: bounded by budgets that all peers share, under the virtual clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import torch

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.pipeline.loss_screen import ENOUGH_OF_ONE, ODD_AT_ONCE, ODD_SHARE
from protocol.access.peer_limits import BAN_AFTER_STRIKES, LONGEST_COMING
from protocol.codecs.codec import encode
from protocol.errors import NolocoError, OddLoss, PeerUnreachable, Refused
from protocol.messages.frame import FrameType
from protocol.messages.training import Evaluate, Forward, Ready
from protocol.records.identity import Identity
from protocol.rpc.door import MEMBERS
from protocol.rpc.frames import read_frame, write_frame
from protocol.rpc.rpc import Traffic
from protocol.transport.base import Stream
from tests.swarm.micro import FOREVER, guest_of, peer_of, run_swarm, stage_nodes, step_of, training
from tests.unit.test_door import CALLER, a_door
from tests.unit.test_frames import framed
from tests.unit.two_peers import in_virtual_time, say_done, two_peers

SECONDS = 30.0
KEEPS = 0.88  # of its steps: visitors get a tenth of the compute time


async def steps_in(swarm: SimulatedSwarm, stage: int) -> int:
    before = sum(map(step_of, stage_nodes(swarm, stage)))
    await asyncio.sleep(SECONDS)
    return sum(map(step_of, stage_nodes(swarm, stage))) - before


async def trained_meanwhile(
    swarm: SimulatedSwarm, flood: Callable[[], Awaitable[object]], at_once: int, stage: int = 1
) -> float:
    """A stage's steps, by default the last one's, during the flood, by those of as long a time before."""

    async def go_on() -> None:
        while True:
            try:
                await flood()
            except NolocoError:
                await asyncio.sleep(1e-3)

    undisturbed = await steps_in(swarm, stage)
    floods = [asyncio.create_task(go_on()) for _ in range(at_once)]
    disturbed = await steps_in(swarm, stage)
    for task in floods:
        task.cancel()
    await asyncio.wait(floods)
    return disturbed / undisturbed


def test_evaluations_leave_training_its_speed() -> None:
    """Before: 145 a second, and training at half its speed."""

    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        visitor, victim = await guest_of(swarm), peer_of(stage_nodes(swarm, 1)[0])
        labels = torch.zeros(2, 32, dtype=torch.int32)
        parcel = [encode(torch.randn(2, 32, 16), "fp32"), encode(labels, "int32")]

        async def flood() -> None:
            await visitor.call(victim, Evaluate(stage=1, route=[]), parcel, deadline=5.0)

        assert await trained_meanwhile(swarm, flood, 8) > KEEPS
        await swarm.leave()

    run_swarm(main())


def test_a_member_that_sends_nan_is_banned_and_training_keeps_its_speed() -> None:
    """Before: 700 a second for ever, each with a place in the step and a turn of the compute thread."""

    async def main() -> None:
        swarm = await training(1, inner__total_steps=FOREVER)
        last = stage_nodes(swarm, 1)[0]
        mallory = await guest_of(swarm, stage=0)
        labels = torch.zeros(2, 32, dtype=torch.int32)
        parcel = [encode(torch.full((2, 32, 16), math.nan), "fp32"), encode(labels, "int32")]
        sent, refused = 0, 0

        async def flood() -> None:
            nonlocal sent, refused
            sent += 1
            try:
                await mallory.call(
                    peer_of(last), Forward(microbatch=f"{sent}", stage=1), parcel, deadline=5.0
                )
            except Refused as refusal:
                refused += refusal.code == "non-finite"
                raise

        assert await trained_meanwhile(swarm, flood, 4) > KEEPS
        assert last.rpc.is_banned(mallory.transport.peer_id)
        assert refused <= BAN_AFTER_STRIKES + 4
        await swarm.leave()

    run_swarm(main())


def test_a_member_that_floods_microbatches_gets_a_senders_share() -> None:
    """Before: first come, first served, and the others kept 0.72 of their steps instead of 0.99."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        swarm.kill(3)
        swarm.seconds = lambda stage, priority: 0.2 if priority is Priority.FORWARD else 0.01
        await asyncio.sleep(10.0)
        last, mallory = stage_nodes(swarm, 1)[0], await guest_of(swarm, stage=0)
        labels = torch.zeros(2, 32, dtype=torch.int32)
        parcel = [encode(torch.randn(2, 32, 16), "fp32"), encode(labels, "int32")]
        sent = 0

        async def flood() -> None:
            nonlocal sent
            sent += 1
            try:
                await mallory.call(
                    peer_of(last), Forward(microbatch=f"{sent}", stage=1), parcel, deadline=60.0
                )
            except Refused:
                await asyncio.sleep(0.01)

        kept = await trained_meanwhile(swarm, flood, 16, stage=0)
        print(f"the others keep {kept:.2f}")
        assert kept > 0.85
        await swarm.leave()

    run_swarm(main())


def test_a_member_that_floods_nonsense_takes_little_of_the_compute_time() -> None:
    """Before: all that the others left for a moment, which on a machine with other work to do was two thirds."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        swarm.seconds = lambda stage, priority: 0.05 if priority is Priority.FORWARD else 0.01
        await asyncio.sleep(30.0)
        last, mallory = stage_nodes(swarm, 1)[0], await guest_of(swarm, stage=0)
        labels = torch.randint(0, 12, (2, 32), dtype=torch.int32)
        parcel = [encode(100 * torch.randn(2, 32, 16), "fp32"), encode(labels, "int32")]
        sent, odd = 0, 0

        async def flood() -> None:
            nonlocal sent, odd
            sent += 1
            try:
                await mallory.call(
                    peer_of(last), Forward(microbatch=f"{sent}", stage=1), parcel, deadline=60.0
                )
            except Refused as refusal:
                odd += refusal.code == OddLoss.CODE
                await asyncio.sleep(0.01)

        kept = await trained_meanwhile(swarm, flood, 16, stage=0)
        print(f"{odd} of {sent} computed in vain; the others keep {kept:.2f}")
        assert ENOUGH_OF_ONE < odd <= 2 * ODD_AT_ONCE + ODD_SHARE * SECONDS / 0.05
        assert kept > 0.85
        await swarm.leave()

    run_swarm(main())


@in_virtual_time
async def test_half_frames_of_many_peers_share_one_budget_and_honest_ones_get_through() -> None:
    """Before: each identity held as much as a request may have, without end and without a bound over all."""
    async with two_peers() as two:
        megabyte, identities = 1 << 20, 24
        two.server.handle(Ready.answered_by(say_done, Traffic.GOSSIP))
        two.server.limit({Traffic.GOSSIP: 2 * megabyte})
        two.server._inflow.most = 8 * megabyte
        tensor = encode(torch.zeros(megabyte // 4), "fp32")
        raw = bytearray(
            framed([1, "ready", {"pair": "p"}, [["fp32", [megabyte // 4], megabyte]]], bytes(megabyte))
        )
        hold = []
        for number in range(identities):
            mallory = MemoryTransport(two.network, Identity.from_seed("mallory", number))
            await mallory.start()
            stream = await mallory.open(two.address, Traffic.GOSSIP.protocol, 5.0)
            hold.append((stream, asyncio.create_task(trickle(stream, raw))))
        most = 0
        for _ in range(10):
            asked = asyncio.get_running_loop().time()
            await two.ask(tensors=[tensor], deadline=3 * LONGEST_COMING)
            assert asyncio.get_running_loop().time() - asked < 2 * LONGEST_COMING
            most = max(most, two.server.coming)
            await asyncio.sleep(1.0)
        assert 0 < most <= 8 * megabyte
        for _, task in hold:
            task.cancel()
        await asyncio.wait([task for _, task in hold])


async def trickle(stream: Stream, raw: bytearray) -> None:
    """As slowly as a frame may come, and never to its end."""
    half = len(raw) // 2
    try:
        await stream.write(raw[:half])
        for start in range(half, len(raw) - 1, 40_000):
            await asyncio.sleep(1.0)
            await stream.write(raw[start : start + 40_000])
        await asyncio.sleep(3_600.0)
    except PeerUnreachable:
        return


@in_virtual_time
async def test_unknown_kinds_of_a_megabyte_are_refused_at_a_rate() -> None:
    """Before: 190 a second, each read and refused as fast as it came."""
    async with a_door({CALLER.peer_id: 1}) as two:
        two.server.limit({Traffic.GOSSIP: 2 << 20})
        tensor, refused = encode(torch.zeros(1 << 18), "fp32"), 0
        began = two.network.now()

        async def flood() -> None:
            nonlocal refused
            stream = await two.raw_stream()
            for number in range(1_000):
                await write_frame(stream, FrameType.REQUEST, number, "no-such-kind", {}, [tensor])
                assert (await read_frame(stream, 1 << 20)).type is FrameType.REFUSAL
                refused += 1

        floods = [asyncio.create_task(flood()) for _ in range(4)]
        await asyncio.sleep(20.0)
        at_once, a_second = MEMBERS[0]
        assert 0 < refused <= at_once + a_second * (two.network.now() - began)
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
