"""Visitors' places: shares by network and by peer; what is old gives way, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest
import torch

from node.pipeline.inference import ONWARD_MOST
from protocol.codecs.codec import encode
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages.training import Evaluate, Evaluated
from protocol.rpc.door import VISITOR_PLACES
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.rpc.visitor_places import GIVES_WAY_SECONDS, VisitorPlaces
from tests.swarm.micro import FOREVER, guest_of, peer_of, run_swarm, stage_nodes, training
from tests.unit.two_peers import in_virtual_time

MALLORY, VISITOR = PeerId("mallory"), PeerId("visitor")


def network_of(peer: PeerId) -> str:
    return peer.split("/")[0]


class Requests:
    """Requests that are answered never, and give way by giving their place back."""

    def __init__(self, most: int) -> None:
        self.places = VisitorPlaces(most, network_of)
        self.ended: list[PeerId] = []
        self.has = dict[PeerId, int]()

    async def take(self, peer: PeerId, can_end: bool = True) -> None:
        def give_way() -> bool:
            if can_end:
                self.ended.append(peer)
                self.has[peer] -= 1
                asyncio.get_running_loop().call_soon(lambda: give_back())
            return can_end

        give_back = await self.places.take(peer, give_way)
        self.has[peer] = self.has.get(peer, 0) + 1


@in_virtual_time
async def test_one_that_has_all_places_gives_way_at_once_and_to_a_fair_share_alone() -> None:
    requests = Requests(8)
    hoarding = [asyncio.create_task(requests.take(MALLORY)) for _ in range(20)]
    await asyncio.sleep(0.1)
    visiting = [asyncio.create_task(requests.take(VISITOR)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert requests.has == {MALLORY: 4, VISITOR: 4}
    for task in hoarding + visiting:
        task.cancel()


@in_virtual_time
async def test_many_identities_of_one_network_share_what_one_has() -> None:
    requests = Requests(8)
    hoarding = [asyncio.create_task(requests.take(PeerId(f"10.0.0/{n}"))) for n in range(20)]
    await asyncio.sleep(0.1)
    for _ in range(4):
        await asyncio.wait_for(requests.take(PeerId("10.0.1/1")), 0.1)
    for task in hoarding:
        task.cancel()


@in_virtual_time
async def test_an_old_one_gives_way_to_anybody_and_one_that_cannot_end_is_passed_by() -> None:
    requests = Requests(2)
    await requests.take(PeerId("a/1"), can_end=False)
    await requests.take(PeerId("b/1"))
    began = asyncio.get_running_loop().time()
    await requests.take(PeerId("c/1"))
    assert asyncio.get_running_loop().time() - began == pytest.approx(GIVES_WAY_SECONDS)
    assert requests.ended == [PeerId("b/1")]


@in_virtual_time
async def test_who_stops_waiting_loses_no_place() -> None:
    requests = Requests(1)
    give_back = await requests.places.take(MALLORY, lambda: False)
    waiting = [asyncio.create_task(requests.take(VISITOR)) for _ in range(3)]
    await asyncio.sleep(0.1)
    give_back()
    waiting[0].cancel()  # in the moment in which it is its turn
    await asyncio.sleep(0.1)
    assert waiting[1].done()
    assert not waiting[2].done()
    assert repr(requests.places) == "<VisitorPlaces [Places: 1 of 1 taken | Requests: 1 waiting]>"
    waiting[2].cancel()


def test_evaluations_routed_to_one_that_never_answers_keep_nobody_out() -> None:
    """Failed before: sixteen of them, and nobody could generate or evaluate for as long as that one liked."""

    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        first, last, mute = stage_nodes(swarm, 0)[0], stage_nodes(swarm, 1)[0], await guest_of(swarm, "mute")

        async def silence(request: Request[Evaluate]) -> Answer[Evaluated]:
            await asyncio.sleep(1e6)
            raise AssertionError

        mute.handle(Evaluate.answered_by(silence))
        await mute.start()
        tokens = encode(torch.zeros(2, 32, dtype=torch.int32), "int32")

        async def evaluate(rpc: Rpc, route: PeerId) -> Evaluated:
            asked = Evaluate(stage=0, route=[route])
            return (await rpc.call(peer_of(first), asked, [tokens, tokens], deadline=2 * ONWARD_MOST))[0]

        mallory = await guest_of(swarm, "mallory")
        hoarding = [
            asyncio.create_task(evaluate(mallory, mute.transport.peer_id)) for _ in range(VISITOR_PLACES)
        ]
        await asyncio.sleep(5.0)
        visitor = await guest_of(swarm, "visitor")
        async with asyncio.timeout(5.0):
            for _ in range(3):
                assert (await evaluate(visitor, peer_of(last))).tokens == 64
        ended = [task for task in hoarding if task.done()]
        assert ended
        for task in ended:
            with pytest.raises(Refused, match="busy"):
                task.result()
        for task in hoarding:
            task.cancel()
        await asyncio.wait(hoarding)
        await swarm.leave()

    run_swarm(main())
