"""What nodes give adds up over their lives, by what others sign, and is seen by a visitor when they are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.inspect.contributors import contributions
from bootstrap.inspect.observer import Observer
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.service.receipts import COLLECT_SECONDS, Receipts
from protocol.ground import PeerId
from protocol.messages.peers import GetReceipts, ReceiptList
from protocol.records.receipts import Contribution, Receipt
from protocol.rpc.rpc import Answer, Request
from tests.swarm.micro import FOREVER, everyone_goes_on, guest_of, run_swarm, training, until


async def seen(swarm: SimulatedSwarm, guest: str = "visitor") -> dict[PeerId, Contribution]:
    rpc = await guest_of(swarm, guest)
    await rpc.transport.connect(
        [address for node in swarm.nodes.values() for address in node.transport.addresses()], 5.0
    )
    observer = Observer(rpc.transport, rpc, swarm.seed_peer.signed)
    return {one.peer: one for one in await contributions(observer, await observer.survey())}


@pytest.mark.long
def test_what_was_given_adds_up_over_lives_and_outlasts_the_giver(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        await everyone_goes_on(swarm, 20)
        peers = {number: node.transport.peer_id for number, node in swarm.nodes.items()}
        first = await seen(swarm, "first")
        assert set(first) == set(peers.values())
        per_batch = swarm.manifest.inner.microbatches * swarm.manifest.tokens_per_microbatch
        for number, node in swarm.nodes.items():
            # what it has trained on, less what is on its way, and at most that
            given, trained = first[peers[number]].tokens, node.context.counters.tokens
            assert trained - 4 * per_batch <= given <= trained + 4 * per_batch
            assert first[peers[number]].rounds > 0

        swarm.nodes[1].stop()
        await swarm.tasks[1]
        gone = (await seen(swarm, "second"))[peers[1]]
        assert gone.tokens >= first[peers[1]].tokens
        swarm.nodes.pop(1)
        returned = swarm.add(1, stage=1, name="ann")
        await until(lambda: returned.public_state == "serving")
        await everyone_goes_on(swarm, 20)
        await asyncio.sleep(COLLECT_SECONDS + 5)  # those who are asked hear the name
        back = (await seen(swarm, "third"))[peers[1]]
        assert back.tokens >= gone.tokens + returned.context.throughput.tokens // 2
        assert back.name == "ann"
        assert returned.member.contributions.tokens > 0
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_node_that_lies_about_its_own_is_not_believed() -> None:
    async def main() -> None:
        swarm = await training(2, inner__total_steps=FOREVER)
        liar = swarm.nodes[1]
        me, honest = liar.transport.peer_id, Receipts(liar.member)

        async def boast(request: Request[GetReceipts]) -> Answer[ReceiptList]:
            """More than was signed, and signatures of its own in the place of others'."""
            told = (await honest.on_get(request)).message.receipts
            others = [node.transport.peer_id for node in swarm.nodes.values()]
            more = [receipt._replace(tokens=10**12) for receipt in told if receipt.worker == me]
            forged = [
                Receipt(me, other, 10**12, 10**6, "the best", liar.transport.sign(b"x")) for other in others
            ]
            return Answer(ReceiptList(receipts=[*told, *more, *forged]))

        liar.rpc.handle(GetReceipts.answered_by(boast))
        await everyone_goes_on(swarm, 20)
        found = await seen(swarm)
        assert 0 < found[me].tokens <= 2 * liar.context.counters.tokens
        assert found[me].name == ""
        await swarm.leave()

    run_swarm(main())
