"""Who is dead of those that a newcomer asks, and how long it waits to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from node.membership.joining import LEAST_PATIENCE, PROBE_DEADLINE, patience, serve_greeting, silent
from protocol.ground import PeerId
from protocol.messages.peers import Hello, Welcome
from protocol.records.identity import Identity
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.manifest import load_preset
from protocol.run.signed_manifest import SignedManifest
from tests.unit.two_peers import in_virtual_time


async def say_nothing(request: Request[Hello]) -> Answer[Welcome]:
    await asyncio.sleep(3_600.0)
    raise AssertionError


@asynccontextmanager
async def members(answering: int, mute: int) -> AsyncIterator[tuple[Rpc, list[PeerId]]]:
    """Yield one that asks, and those that it may ask: first those that answer, then those that do not."""
    network = MemoryNetwork(0, Link(latency=0.03))
    signed = SignedManifest.sign(load_preset("tiny"), Identity.from_seed("owner"))
    rpcs = []
    for number in range(1 + answering + mute):
        transport = MemoryTransport(network, Identity.from_seed(f"member {number}"))
        await transport.start()
        rpcs.append(Rpc(transport))
        await rpcs[-1].start()
        if number <= answering:
            serve_greeting(rpcs[-1], transport, signed, is_seed=False)
        else:
            rpcs[-1].handle(Hello.answered_by(say_nothing))
    try:
        yield rpcs[0], [rpc.transport.peer_id for rpc in rpcs[1:]]
    finally:
        for rpc in rpcs:
            await rpc.close()
            await rpc.transport.close()


async def asked(rpc: Rpc, peers: list[PeerId]) -> tuple[set[PeerId], float]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await silent(rpc, peers)
    return found, loop.time() - began


@in_virtual_time
async def test_one_dead_peer_of_many_does_not_hold_a_newcomer_up_until_the_deadline() -> None:
    async with members(answering=23, mute=1) as (rpc, peers):
        dead, seconds = await asked(rpc, peers)
        assert dead == {peers[-1]}
        assert seconds == pytest.approx(LEAST_PATIENCE)


@in_virtual_time
async def test_where_few_are_asked_or_many_are_silent_they_have_the_whole_deadline() -> None:
    async with members(answering=4, mute=2) as (rpc, peers):
        dead, seconds = await asked(rpc, peers)
        assert dead == set(peers[-2:])
        assert seconds == pytest.approx(PROBE_DEADLINE)
        assert await asked(rpc, []) == (set(), 0.0)


@in_virtual_time
async def test_where_all_answer_nobody_waits() -> None:
    async with members(answering=9, mute=0) as (rpc, peers):
        dead, seconds = await asked(rpc, peers)
        assert dead == set()
        assert seconds < 0.2


def test_the_last_ones_are_waited_for_by_what_the_others_took() -> None:
    assert patience(48, 7, 0.1) == PROBE_DEADLINE
    assert patience(48, 6, 0.1) == LEAST_PATIENCE
    assert patience(48, 6, 0.5) == 2.0
    assert patience(48, 6, 2.0) == PROBE_DEADLINE
    assert patience(7, 1, 0.1) == PROBE_DEADLINE, "one of few may be all that its stage has"
