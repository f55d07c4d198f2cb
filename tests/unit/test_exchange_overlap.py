"""Exchanges that overlap with training: φ travels before the round ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from bootstrap.lab.in_memory.memory_link import Link
from node.rounds.meeting import Pair
from protocol.codecs.codec import Encoded, encode
from protocol.messages.training import Contribute
from tests.swarm.micro import run_swarm
from tests.unit.two_ends import PIECE, End, agree, two_ends

pytestmark = pytest.mark.usefixtures("small_pieces")


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
    exchange = end.averager.exchanges
    pair = Pair(partner.me, f"copy {random.random()}")
    for part, offset, piece in pieces:
        message = Contribute(pair=pair.name, part=part, offset=offset, total=end.replica.parameters)  # type: ignore[arg-type]
        exchange.receive(exchange.of(pair), message, [piece])
    assert exchange.of(pair).received.is_set()
    partners = exchange.of(pair).incoming
    for place in end.replica.whole.all_pieces.in_groups(1):
        partners.read(place, partners.total[place.bounds])
    return partners.total.clone()
