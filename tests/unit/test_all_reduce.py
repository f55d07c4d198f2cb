"""DiLoCo's all-reduce over the in-memory network: what replicas get, hold, and are told when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bootstrap.lab.in_memory.memory import MemoryTransport, memory_address
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.in_memory.memory_network import MemoryNetwork
from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.context import Context
from node.membership.view import View
from node.model.compute import InlineCompute
from node.model.replica import Replica
from node.rounds.all_reduce import AllReduce
from node.rounds.gathers import IN_FLIGHT, mean_of
from protocol.codecs.codec import as_read, encode
from protocol.codecs.near_codecs import BITS
from protocol.errors import Refused
from protocol.messages.training import Assemble, Reduce, RollCall
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity
from protocol.records.lineage import UNDATED
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.run.manifest import GOSSIP_CODECS
from tests.swarm.micro import membership_of, micro_manifest

PART = 64  # entries
DEADLINE = 5.0


class Reducer:
    """One replica, as far as an all-reduce needs one."""

    def __init__(self, network: MemoryNetwork, number: int, parameters: int, codec: str) -> None:
        self.transport = MemoryTransport(network, Identity.from_seed(f"replica {number}"))
        self.me = self.transport.peer_id
        self.rpc = Rpc(self.transport, dict.fromkeys(Traffic, 1 << 20))
        self.told: list[dict[str, Any]] = []
        manifest = micro_manifest(
            stages=1, outer__method="diloco", wire__gossip=codec, limits__gossip_deadline=DEADLINE
        )
        self.view = View()
        membership = membership_of(self.rpc, manifest, self.view, self.told.append)
        self.context = Context(membership, 0, InlineCompute(lambda _: 0.0001))
        self.reduce = AllReduce(
            self.context, cast(Replica, SimpleNamespace(parameters=parameters, round=0, lineage=UNDATED))
        )
        self.z = torch.randn(parameters, generator=torch.Generator().manual_seed(number))
        self.most_held = 0

    async def start(self) -> None:
        await self.transport.start()
        await self.rpc.start()
        self.reduce.serve(self.rpc)

    def knows(self, others: list[Reducer]) -> None:
        for other in others:
            self.view.update(other.me, Announcement(stage=0, state="serving", since=0.0), 1e12)

    async def mean(self) -> torch.Tensor:
        return await self.reduce.mean(self.z)

    async def watch_memory(self) -> None:
        while True:
            self.most_held = max(self.most_held, self.reduce.gathers.held)
            await asyncio.sleep(0.001)


async def reducers(
    count: int, parts: float, codec: str = "fp32", link: Link | None = None, others: str = ""
) -> tuple[MemoryNetwork, list[Reducer]]:
    """Sorted by peer id: the first calls the roll, and the n-th owns every n-th part.

    The last one that is made sends in codec `others`, if any, as a replica of another version.
    """
    network = MemoryNetwork(1, link or Link(latency=0.01))
    codecs = [codec] * (count - 1) + [others or codec]
    found = [Reducer(network, number, int(parts * PART), codec) for number, codec in enumerate(codecs)]
    found.sort(key=lambda one: one.me)
    for one in found:
        await one.start()
        one.knows(found)
    for one in found[1:]:
        await one.transport.connect([memory_address(found[0].me)], 5.0)
    return network, found


def within(seconds: float, main: Callable[[], Awaitable[None]]) -> None:
    async def watched() -> None:
        async with asyncio.timeout(seconds):
            await main()

    run_virtual(watched())


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.rounds.all_reduce.PIECE_PARAMETERS", PART)


def expected_mean(members: list[Reducer], codec: str) -> torch.Tensor:
    """Part by part: the mean of what was encoded, encoded once more."""
    size = min(PART, -(-members[0].z.numel() // len(members)))
    parts = zip(*(torch.split(one.z, size) for one in members), strict=True)
    return torch.cat(
        [as_read(encode(mean_of([encode(p, codec) for p in part]), codec)).float() for part in parts]
    )


@pytest.mark.parametrize("codec", [codec for codec in GOSSIP_CODECS if codec not in BITS])
@pytest.mark.parametrize(
    ("replicas", "parts"),
    [(2, 1), (3, 1), (16, 1), (2, 27), (3, 27), (5, 26.4), (16, 27), (2, 200), (3, 200)],
)
def test_all_get_the_same_exact_mean(replicas: int, parts: float, codec: str) -> None:
    async def main() -> None:
        _, found = await reducers(replicas, parts, codec)
        means = await asyncio.gather(*(one.mean() for one in found))
        expected = expected_mean(found, codec)
        assert all(torch.equal(mean, expected) for mean in means)
        assert not any(one.told for one in found)

    within(600.0, main)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_sixteen_replicas_and_a_thousand_parts(codec: str) -> None:
    async def main() -> None:
        _, found = await reducers(16, 1000, codec)
        means = await asyncio.gather(*(one.mean() for one in found))
        expected = expected_mean(found, codec)
        assert all(torch.equal(mean, expected) for mean in means)

    within(600.0, main)


def test_the_mean_of_halves_is_not_rounded_twice() -> None:
    """In fp16 the sum of many would lose digits, or overflow."""
    parts = [encode(torch.full((4,), 60_000.0), "fp16") for _ in range(16)]
    assert torch.equal(mean_of(parts), torch.full((4,), 60_000.0).half().float())


def test_what_an_owner_holds_does_not_grow_with_the_stage() -> None:
    async def main() -> None:
        _, found = await reducers(4, 400, link=Link(latency=0.02, jitter=0.02))
        watching = [asyncio.ensure_future(one.watch_memory()) for one in found]

        async def late(one: Reducer, seconds: float) -> torch.Tensor:
            await asyncio.sleep(seconds)
            return await one.mean()

        means = await asyncio.gather(*(late(one, number) for number, one in enumerate(found)))
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert 0 < max(one.most_held for one in found) <= IN_FLIGHT * len(found)
        for task in watching:
            task.cancel()

    within(600.0, main)


def test_a_round_may_take_far_longer_than_its_deadline() -> None:
    """As long as parts come: 200 of them on slow links."""

    async def main() -> None:
        _, found = await reducers(2, 200, link=Link(latency=0.5))
        loop = asyncio.get_running_loop()
        means = await asyncio.gather(*(one.mean() for one in found))
        assert loop.time() > 5 * DEADLINE
        assert torch.equal(*means)
        assert not any(one.told for one in found)

    within(600.0, main)


def test_one_that_dies_in_the_middle_costs_its_parts_and_is_told() -> None:
    async def main() -> None:
        network, found = await reducers(4, 400, link=Link(latency=0.1))
        running = [asyncio.ensure_future(one.mean()) for one in found]
        await asyncio.sleep(3.0)
        dead, others = found[2], [found[0], found[1], found[3]]
        network.kill(dead.me)
        running[2].cancel()
        means = [await running[number] for number in (0, 1, 3)]
        mine = torch.arange(400 * PART) // PART % 4 != 2  # what the living own
        assert all(torch.equal(mean[mine], means[0][mine]) for mean in means)
        for one in others:
            (told,) = [event for event in one.told if event["event"] == "all-reduce-incomplete"]
            assert 0 < told["kept"] <= 100
            assert told["fewest"] == 3
            assert any(dead.me[-8:] in reason for reason in told["reasons"])

    within(600.0, main)


def test_one_of_another_version_is_named_once_and_averages_with_nobody() -> None:
    async def main() -> None:
        _, found = await reducers(4, 27, others="bf16")
        for _ in range(3):
            means = await asyncio.gather(*(one.mean() for one in found))
        alike = [one for one in found if one.context.manifest.wire.gossip == "fp32"]
        means = [mean for one, mean in zip(found, means, strict=True) if one in alike]
        assert all(torch.equal(mean, expected_mean(alike, "fp32")) for mean in means)
        for one in found:
            named = [told["partner"] for told in one.told if told["event"] == "version-apart"]
            assert len(named) == len(set(named)) == (1 if one in alike else len(alike))
            told = [event["event"] for event in one.told]
            assert told.count("all-reduce-incomplete") <= 1, "the round in which it was found out"

    within(600.0, main)


@pytest.mark.parametrize("frozen", [0, 2])
def test_one_that_freezes_ends_no_round_for_ever(frozen: int) -> None:
    async def main() -> None:
        network, found = await reducers(4, 400, link=Link(latency=0.1))
        running = [asyncio.ensure_future(one.mean()) for one in found]
        await asyncio.sleep(3.0)
        network.freeze(found[frozen].me)
        await asyncio.wait([task for number, task in enumerate(running) if number != frozen])
        assert all(
            any(event["event"] == "all-reduce-incomplete" for event in one.told)
            for number, one in enumerate(found)
            if number != frozen
        )
        running[frozen].cancel()

    within(40 * DEADLINE, main)


def test_one_that_is_far_slower_is_waited_for_once_and_meets_the_others_when_it_can() -> None:
    async def main() -> None:
        _, found = await reducers(3, 27)
        loop = asyncio.get_running_loop()
        quick, slow = found[:2], found[2]
        began = loop.time()
        await asyncio.gather(*(one.mean() for one in quick))
        assert DEADLINE <= loop.time() - began < DEADLINE + 2
        began = loop.time()
        await asyncio.gather(*(one.mean() for one in quick))
        assert loop.time() - began < 2
        late = asyncio.ensure_future(slow.mean())
        await asyncio.sleep(2.0)
        means = [*await asyncio.gather(*(one.mean() for one in quick)), await late]
        assert all(torch.equal(mean, expected_mean(found, "fp32")) for mean in means)

    within(60.0, main)


def test_one_that_meets_nobody_goes_on_alone_and_is_told() -> None:
    async def main() -> None:
        _, found = await reducers(2, 27)
        mean = await found[0].mean()
        assert torch.equal(mean, found[0].z)
        assert [event["event"] for event in found[0].told] == ["all-reduce-alone"]

    within(60.0, main)


def test_who_counts_another_group_is_with_those_that_call_the_roll() -> None:
    """The third knows only the first, which calls the roll: all three average."""

    async def main() -> None:
        _, found = await reducers(3, 27)
        found[2].view.suspect(found[1].me)
        means = await asyncio.gather(*(one.mean() for one in found))
        assert all(torch.equal(mean, expected_mean(found, "fp32")) for mean in means)

    within(60.0, main)


def test_a_roll_of_peers_that_there_are_not_is_refused() -> None:
    """Failed before: each of them was dialled, twice a round, and its part of the state was never averaged."""

    async def main() -> None:
        _, found = await reducers(3, 27)
        ghosts = [Identity.from_seed(f"ghost {number}").peer_id for number in range(500)]

        async def answer(request: Request[Assemble]) -> Answer[RollCall]:
            return Answer(RollCall(name="a", members=[*(one.me for one in found), *ghosts]))

        found[0].rpc.handle(Assemble.answered_by(answer))
        for one in found[1:]:
            assert torch.equal(await one.mean(), one.z)
            (told,) = one.told
            assert told["reason"] == "the roll names 500 peers that are no replicas of this stage"
            assert one.reduce.bytes_sent == 0

    within(10.0, main)


def test_a_roll_with_one_newcomer_that_this_replica_does_not_know_is_taken() -> None:
    async def main() -> None:
        _, found = await reducers(3, 27)
        found[1].view.forget([found[2].me])
        await asyncio.gather(*(one.mean() for one in found))
        assert "all-reduce-alone" not in [told["event"] for told in found[1].told]

    within(60.0, main)


def test_a_part_that_cannot_be_sent_stays_and_is_told_while_the_others_are_averaged() -> None:
    async def main() -> None:
        _, found = await reducers(3, 27, "fp16")
        found[0].z[0] = 1e6  # infinite in fp16
        means = await asyncio.gather(*(one.mean() for one in found))
        assert all(torch.equal(mean[PART:], means[0][PART:]) for mean in means)
        assert means[0][0] == 1e6
        (told,) = found[0].told
        assert (told["kept"], told["parts"]) == (1, 27)
        assert not found[1].rpc.is_banned(found[0].me)

    within(60.0, main)


def test_strangers_and_what_does_not_fit_are_refused() -> None:
    async def main() -> None:
        network, found = await reducers(2, 27)
        stranger = Reducer(network, 99, 27 * PART, "fp32")
        await stranger.start()
        await stranger.transport.connect([memory_address(found[0].me)], 5.0)

        async def give(one: Reducer, offset: int, entries: int, codec: str = "fp32") -> None:
            await one.rpc.call(
                found[0].me,
                Reduce(offset=offset, total=27 * PART, name="x"),
                [encode(torch.zeros(entries), codec)],
                deadline=1.0,
            )

        with pytest.raises(Refused, match="group"):
            await give(stranger, 0, PART)
        with pytest.raises(Refused, match="group"):
            await stranger.rpc.call(found[0].me, Assemble(), deadline=1.0)
        for offset, entries, codec in ((0, PART + 1, "fp32"), (27 * PART, 1, "fp32"), (0, PART, "int8")):
            with pytest.raises(Refused, match="malformed"):
                await give(found[1], offset, entries, codec)
        assert found[0].reduce.gathers.held == 0

    within(60.0, main)


def test_it_says_in_a_line_how_far_it_is() -> None:
    async def main() -> None:
        _, [one, other] = await reducers(2, 27)
        assert repr(one.reduce) == "<AllReduce, round 0: replicas: 2, bytes sent: 0, parts waiting here: 0>"
        await asyncio.gather(one.mean(), other.mean())
        sent = one.reduce.bytes_sent
        assert sent > 0
        assert (
            repr(one.reduce)
            == f"<AllReduce, round 0: replicas: 2, bytes sent: {sent}, parts waiting here: 0>"
        )

    within(60.0, main)
