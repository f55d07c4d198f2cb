"""Links measured by the nodes themselves, against the links that the network gave them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bootstrap.inspect.link_map import MappedNode, link_map, scenario_of, seen_from_outside
from bootstrap.lab.in_memory.memory_link import Link
from bootstrap.lab.placement.scenario import scenario_from
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.links.links import DUTY, LEAST_PAUSE, LinkEstimate
from node.links.probing import MOST_PROBES
from node.process.daemon import Node
from protocol.access.peer_limits import BAN_AFTER_STRIKES
from protocol.codecs.codec import Encoded
from protocol.errors import Refused
from protocol.ground import PeerId
from protocol.messages import Done
from protocol.messages.peers import MAX_PROBE_BYTES, Probe, Probed
from protocol.rpc.rpc import Answer, Request, Traffic
from tests.swarm.micro import FOREVER, guest_of, micro_swarm, observer_of, peer_of, run_swarm, training, until

JITTER = 0.002
LATENCY_WITHIN = 0.2  # relative
# A factor, either way, of all links but one. Over eight seeds three of 240 were more than 1.32 off: 1.36, 1.66, 2.07;
# which ones are is drawn anew by each byte that a message has more.
BANDWIDTH_WITHIN, ONE_WITHIN = 2.0, 4.0
GOSSIP_WITHIN = 0.5  # training goes on beside it


def world(sender: PeerId, receiver: PeerId) -> Link:
    """Links of 5 to 80 ms one way and 1 to 32 MB/s; the same latency both ways, another bandwidth."""
    latency = math.exp(random.Random(min(sender, receiver) + max(sender, receiver)).uniform(-5.3, -2.5))
    bandwidth = 1e6 * 2 ** random.Random(sender + receiver).uniform(0, 5)
    return Link(latency, bandwidth, jitter=JITTER)


class SeenLinks:
    """Mutable state: the seconds and bytes that probes took of each link, and when each node sent one."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self.busy: dict[tuple[PeerId, PeerId], float] = {}
        self.bytes: dict[PeerId, int] = {}
        self.visits: dict[PeerId, list[float]] = {}
        for node in swarm.nodes.values():
            self._watch(peer_of(node), node)

    def _watch(self, me: PeerId, node: Node) -> None:
        call = node.rpc.call_and_read

        async def counted(peer: PeerId, request: Any, tensors: Sequence[Encoded] = (), **more: Any) -> Any:
            if isinstance(request, Probe):
                nbytes = sum(tensor.nbytes for tensor in tensors)
                self.bytes[me] = self.bytes.get(me, 0) + nbytes
                seconds = nbytes / world(me, peer).bandwidth
                self.busy[me, peer] = self.busy.get((me, peer), 0.0) + seconds
            return await call(peer, request, tensors, **more)

        node.rpc.call_and_read = counted  # type: ignore[method-assign]
        visit = node.links.visit

        def seen(peer: PeerId, now: float) -> LinkEstimate:
            self.visits.setdefault(me, []).append(now)
            return visit(peer, now)

        node.links.visit = seen  # type: ignore[method-assign]


def pairs(swarm: SimulatedSwarm) -> list[tuple[Node, PeerId]]:
    nodes = list(swarm.nodes.values())
    return [(node, peer_of(other)) for node in nodes for other in nodes if other is not node]


def errors(swarm: SimulatedSwarm) -> tuple[list[float], list[float]]:
    """Of every pair's latency, relative, and of its bandwidth, as a factor of at least 1."""
    latency, bandwidth = [], []
    for node, peer in pairs(swarm):
        link, truth = node.links.of(peer), world(peer_of(node), peer)
        assert link is not None, "a pair was never measured"
        assert link.round_trip is not None
        assert link.bandwidth is not None
        latency.append(abs(link.round_trip / 2 / truth.latency - 1))
        bandwidth.append(math.exp(abs(math.log(link.bandwidth / truth.bandwidth))))
    return latency, bandwidth


async def measured(minutes: float, **settings: Any) -> tuple[SimulatedSwarm, SeenLinks]:
    swarm: SimulatedSwarm = micro_swarm(link=world, **settings)
    await swarm.seed_peer.start()
    for number in range(6):
        swarm.add(number, stage=number % 2, speed=0.1)
    await until(lambda: all(node.stage is not None for node in swarm.nodes.values()))
    seen = SeenLinks(swarm)
    await asyncio.sleep(60 * minutes)
    return swarm, seen


def check_scenario(swarm: SimulatedSwarm) -> None:
    """The planner reads the same links as the world has."""
    found = link_map(
        MappedNode(peer_of(node), node.context.stage, node.links.told()) for node in swarm.nodes.values()
    )
    assert found.measured == found.pairs == 15
    scenario = scenario_from(json.loads(json.dumps(scenario_of(found, swarm.manifest))))
    assert scenario.estimated == 0
    for i, a in enumerate(found.peers):
        for j, b in enumerate(found.peers):
            if i != j:
                assert scenario.latency[i, j] == pytest.approx(world(a, b).latency, rel=LATENCY_WITHIN)
                mean = (world(a, b).bandwidth + world(b, a).bandwidth) / 2
                assert scenario.bandwidth[i, j] / 8 == pytest.approx(mean, rel=BANDWIDTH_WITHIN - 1)


@pytest.mark.long_but("idle")
@pytest.mark.parametrize("total_steps", [5, FOREVER], ids=["idle", "training"])
def test_links_are_known_after_some_minutes(total_steps: int) -> None:
    async def main() -> tuple[list[float], list[float]]:
        swarm, seen = await measured(6, inner__total_steps=total_steps)
        found = errors(swarm)
        elapsed = asyncio.get_running_loop().time()
        print(f"bytes/s per node: {max(seen.bytes.values()) / elapsed:.0f}")
        print(f"largest share of a link's time: {max(seen.busy.values()) / elapsed:.5f}")
        assert max(seen.busy.values()) / elapsed < DUTY
        for times in seen.visits.values():
            assert all(after - before >= LEAST_PAUSE for before, after in itertools.pairwise(times))
        assert not any(node.context.counters.probe_breaches for node in swarm.nodes.values())
        check_scenario(swarm)
        await swarm.leave()
        return found

    latency, bandwidth = run_swarm(main())
    print(f"latency: worst {max(latency):.3f}, median {sorted(latency)[len(latency) // 2]:.3f}")
    print(f"bandwidth: worst {max(bandwidth):.3f}, median {sorted(bandwidth)[len(bandwidth) // 2]:.3f}")
    assert max(latency) < LATENCY_WITHIN
    *others, worst = sorted(bandwidth)
    assert others[-1] < BANDWIDTH_WITHIN
    assert worst < ONE_WITHIN


def probe(nbytes: int) -> list[Encoded]:
    return [Encoded("int32", (nbytes // 4,), (memoryview(bytes(nbytes)),))] if nbytes else []


@pytest.mark.parametrize(
    ("nbytes", "answered"), [(0, MOST_PROBES), (MAX_PROBE_BYTES, 2), (MAX_PROBE_BYTES + 4, 0)]
)
def test_who_asks_too_often_or_too_much_is_refused_counted_and_banned(nbytes: int, answered: int) -> None:
    async def main() -> None:
        swarm = await training(1, step=1, inner__total_steps=FOREVER)
        node, guest = swarm.nodes[0], await guest_of(swarm, stage=1)
        replies, refusals = 0, list[str]()
        for _ in range(answered + BAN_AFTER_STRIKES):
            try:
                await guest.call(
                    peer_of(node), Probe(nonce=bytes(8)), probe(nbytes), deadline=5.0, traffic=Traffic.STATE
                )
                replies += 1
            except Refused as refusal:
                refusals.append(refusal.code)
        assert replies == answered
        assert refusals == ["too-often"] * BAN_AFTER_STRIKES
        assert node.context.counters.probe_breaches == BAN_AFTER_STRIKES
        assert node.rpc.is_banned(guest.transport.peer_id)
        await guest.close()
        await guest.transport.close()
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.parametrize("answer", [Probed(digest=bytes(16)), Done()], ids=["early", "other"])
def test_who_answers_nonsense_is_counted_and_tells_nothing(answer: Any) -> None:
    async def main() -> None:
        swarm = await training(1, step=1, inner__total_steps=FOREVER)
        liar, honest = swarm.nodes[0], swarm.nodes[1]

        async def lie(request: Request) -> Answer:
            return Answer(answer)

        liar.rpc.handle(Probe.answered_by(lie))
        await until(lambda: honest.context.counters.probe_breaches > 0)
        link = honest.links.of(peer_of(liar))
        assert link is not None
        assert link.round_trip is None
        assert honest.links.told() == []
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_a_peer_that_dies_is_told_of_no_more_than_was_measured_and_disturbs_nobody() -> None:
    async def main() -> None:
        swarm = await training(2, step=1, inner__total_steps=FOREVER)
        await until(lambda: all("Peers: 3 of" in repr(node.links) for node in swarm.nodes.values()), 300.0)
        swarm.kill(3)
        step = swarm.nodes[0].replica.step
        await asyncio.sleep(30.0)
        assert swarm.nodes[0].replica.step > step + 5
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_records_and_numbers_tell_the_links() -> None:
    async def main() -> None:
        swarm = await training(1, step=1, inner__total_steps=FOREVER)
        a, b = swarm.nodes[0], swarm.nodes[1]
        await until(lambda: bool(b.view.members(0, b.transport.now())[0].announcement.links), 60.0)
        (published,) = b.view.members(0, b.transport.now())[0].announcement.links
        assert published.peer == peer_of(b)[-16:]
        assert 0.02 < published.round_trip < 0.03
        assert a.links.told()[0].peer == published.peer
        observer = await observer_of(swarm)
        found = link_map(seen_from_outside(await observer.look(), observer.manifest))
        assert found.peers == (peer_of(a), peer_of(b))
        assert found.stages == (0, 1)
        assert 0.01 < found.latency_s[0, 1] == found.latency_s[1, 0] < 0.015
        assert found.measured == 1
        assert (found.throughput > 0).all()
        await observer.rpc.close()
        await observer.transport.close()
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
def test_gossip_tells_the_bandwidth_and_takes_the_place_of_payloads() -> None:
    async def main() -> None:
        swarm = await training(
            2,
            step=1,
            link=Link(0.03, 8e6),
            stages=1,
            model__hidden_size=128,
            model__intermediate_size=256,
            inner__total_steps=FOREVER,
            outer__inner_steps=2,
            limits__gossip_deadline=30.0,
        )
        a, b = swarm.nodes[0], peer_of(swarm.nodes[1])
        await until(lambda: a.links.of(b) is not None and a.links.of(b).round_trips > 0, 30.0)
        link = a.links.of(b)
        assert link is not None
        payloads = link.transfers
        await until(lambda: link.transfers >= payloads + 5, 120.0)
        assert a.links.bulk_bytes(b, asyncio.get_running_loop().time()) == 0
        print(f"from gossip: {link.bandwidth:.3g} of 8e+06 bytes/s, ± {link.uncertainty:.2f}")
        assert link.bandwidth == pytest.approx(8e6, rel=GOSSIP_WITHIN)
        await swarm.leave()

    run_swarm(main())
