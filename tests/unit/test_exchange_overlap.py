"""Exchanges that overlap with training: φ before the round ends, or everything after it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from node.model.replica import Replica
from node.rounds.pairing import Pair
from protocol.codec import Encoded, encode
from protocol.messages import Contribute
from protocol.transport.memory_link import Link
from tests.swarm.micro import run_swarm
from tests.unit.two_ends import PIECE, End, agree, two_ends

pytestmark = pytest.mark.usefixtures("small_pieces")

# --- φ early ---------------------------------------------------------------------------------------


def test_only_the_progress_is_left_for_the_end() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early", wire__progress="int8")
        agree(a, b)
        await asyncio.sleep(5)
        early = a.context.counters.gossip_bytes
        assert early == 4 * a.replica.parameters
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        late = a.context.counters.gossip_bytes - early
        assert late < 0.27 * early
        [event] = [event for event in a.events if event["event"] == "round"]
        assert event["gossip_bytes"] == early + late
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_phi_makes_way_for_other_traffic_until_the_round_ends() -> None:
    async def main() -> None:
        a, b = await two_ends(Link(latency=0.01, bandwidth=40_000.0), outer__overlap="phi-early")
        in_flight, most = 0, 0
        real = a.rpc.call

        async def call(*args: Any, **named: Any) -> Any:
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            try:
                return await real(*args, **named)
            finally:
                in_flight -= 1

        a.rpc.call = call  # type: ignore[method-assign]
        agree(a, b)
        whole = 4 * a.replica.parameters / 40_000  # seconds that φ takes when the link is its own
        await asyncio.sleep(whole)
        assert most == 1
        assert 0.3 < a.context.counters.gossip_bytes / (4 * a.replica.parameters) < 0.7
        began = asyncio.get_running_loop().time()
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert most > 1
        assert asyncio.get_running_loop().time() - began < 2 * whole
        assert a.context.counters.partners == {b.me: 1}
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


@pytest.mark.parametrize("progress", ["fp32", "int8"])
def test_parts_may_come_in_any_order_and_more_than_once(progress: str) -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="phi-early", wire__progress=progress)
        agree(a, b)
        await asyncio.sleep(5)
        b.train(1)
        pieces = messages_of(b, progress)
        straight = receive(a, b, pieces)
        shuffled = pieces * 2
        random.Random(3).shuffle(shuffled)
        assert torch.equal(receive(a, b, shuffled), straight)
        assert torch.equal(receive(a, b, pieces[::-1]), straight)
        z = 0.7 * b.replica.phi + 0.7 * (b.replica.flat.values - b.replica.phi)
        assert torch.allclose(2 * straight, z, atol=0.7 / 254 * 0.1 if progress == "int8" else 1e-7)
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def messages_of(end: End, progress: str) -> list[tuple[str, int, Encoded]]:
    """Every piece of both parts."""
    replica = end.replica
    parts = {"phi": (replica.phi, "fp32"), "progress": (replica.flat.values - replica.phi, progress)}
    return [
        (part, start, encode(whole[start : start + PIECE], codec))
        for part, (whole, codec) in parts.items()
        for start in range(0, replica.parameters, PIECE)
    ]


def receive(end: End, partner: End, pieces: list[tuple[str, int, Encoded]]) -> torch.Tensor:
    """z as `end` puts it together."""
    exchange = end.rounds._exchange
    pair = Pair(partner.me, f"copy {random.random()}")
    for part, offset, piece in pieces:
        message = Contribute(pair=pair.name, part=part, offset=offset, total=end.replica.parameters)  # type: ignore[arg-type]
        exchange.receive(exchange.of(pair), message, [piece])
    assert exchange.of(pair).received.is_set()
    partners = exchange.of(pair).partners
    for index in range(end.replica.pieces):
        bounds = end.replica.piece_bounds(index)
        partners.read(index, bounds, partners.total[bounds])
    return partners.total.clone()


# --- late ------------------------------------------------------------------------------------------


def test_a_late_step_carries_what_was_trained_meanwhile() -> None:
    async def main(trains: bool) -> None:
        a, b = await two_ends(outer__overlap="late")
        plain_a, plain_b = await two_ends(outer__overlap="none")
        ends = (a, b, plain_a, plain_b)
        agree(a, b)
        agree(plain_a, plain_b)
        for seed, end in enumerate(ends):
            end.train(seed % 2)
        await asyncio.gather(*(end.rounds.finish() for end in ends))
        assert a.replica.round == 0  # its step is still due
        assert a.replica.steps_in_round == 0  # but the next round has begun
        moved = a.train(7) if trains else torch.zeros(a.replica.parameters)
        await asyncio.sleep(5)
        await asyncio.gather(a.rounds.settle(wait=False), b.rounds.settle(wait=False))
        assert torch.equal(a.replica.phi, plain_a.replica.phi)
        assert torch.equal(a.replica.delta, plain_a.replica.delta)
        assert torch.allclose(a.replica.flat.values, plain_a.replica.phi + moved, atol=1e-7)
        assert torch.equal(b.replica.flat.values, plain_b.replica.flat.values)
        assert a.replica.steps_in_round == (1 if trains else 0)
        await asyncio.gather(*(end.close() for end in ends))

    run_swarm(main(trains=False))
    run_swarm(main(trains=True))


def test_leaving_a_round_late_does_not_wait_and_the_next_end_does() -> None:
    async def main() -> None:
        a, b = await two_ends(Link(latency=0.2), outer__overlap="late")
        agree(a, b)
        a.train(1), b.train(2)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(a.rounds.finish(), b.rounds.finish())
        assert asyncio.get_running_loop().time() - began < 0.05
        await a.rounds.settle(wait=False)
        assert a.replica.round == 0
        a.train(3)
        await a.rounds.finish()  # alone: nobody agreed on this round
        assert a.replica.round == 2
        rounds = [event for event in a.events if event["event"] == "round"]
        assert [event["partner"] for event in rounds] == [b.me, None]
        assert rounds[0]["blocked_seconds"] > 0.4
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_the_last_round_is_not_left_late() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="late")
        agree(a, b)
        a.train(1), b.train(2)
        await asyncio.gather(a.rounds.finish(is_last=True), b.rounds.finish())
        assert a.replica.round == 1
        assert torch.equal(a.replica.flat.values, a.replica.phi)
        await b.rounds.settle()
        assert torch.equal(a.pulls[-1], -b.pulls[-1])
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())


def test_a_snapshot_before_the_late_step_is_a_state_to_go_on_from() -> None:
    async def main() -> None:
        a, b = await two_ends(outer__overlap="late")
        agree(a, b)
        phi = a.replica.phi.clone()
        first = a.train(1)
        await a.rounds.finish()
        second = a.train(2)
        snapshot = a.replica.snapshot()
        assert torch.equal(snapshot.phi, phi)
        assert torch.allclose(snapshot.theta - snapshot.phi, first + second, atol=1e-6)
        other = Replica(a.replica.manifest, 0)
        other.restore(snapshot)
        assert other.has_left_round
        other.finish_round_alone()
        assert torch.allclose(other.phi, phi + 0.7 * first, atol=1e-6)
        assert torch.allclose(other.flat.values, other.phi + second, atol=1e-6)
        assert other.steps_in_round == 1
        await asyncio.gather(a.close(), b.close())

    run_swarm(main())
