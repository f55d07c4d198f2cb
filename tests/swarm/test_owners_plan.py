"""The plan of the run's owner is followed, at joining and while running; what others put in its place is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgpack
import pytest

from bootstrap.lab.in_memory.memory import MemoryTransport
from bootstrap.lab.placement.live_plan import LiveSwarm, end_waits, moves_of, seen_by, signed_plan
from bootstrap.lab.placement.noloco import Training
from bootstrap.lab.placement.plan import make_plan, problem_of
from bootstrap.lab.placement.search import Budget
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership.moving import OwnersPlan
from node.watch.events import Events
from protocol.errors import UserError
from protocol.ground import PeerId
from protocol.records.identity import Identity
from protocol.run.placement_plan import PlacementPlan, open_plan, plan_key
from tests.swarm.micro import events_of, observer_of, peer_of, run_swarm, stage_nodes, until
from tests.swarm.movers import LIFETIME, all_train_on, kill_half, settled, somebody_moved
from tests.swarm.test_nothing_is_lost import A, C, leave, three_friends


async def publish(swarm: SimulatedSwarm, sealed: bytes, name: str = "somebody") -> None:
    """In a record of a peer that is no owner: what counts is the signature inside."""
    transport = MemoryTransport(swarm.network, Identity.from_seed(name))
    await transport.start()
    await transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    assert await transport.put(plan_key(swarm.seed_peer.signed.run_id), sealed, 3600.0, 5.0)


def owner_of(swarm: SimulatedSwarm) -> Identity:
    return Identity.from_seed("run", swarm.seed)


def plan_for(swarm: SimulatedSwarm, stages: list[list[PeerId]], seconds: float = 4 * 3600) -> PlacementPlan:
    return PlacementPlan.of(swarm.seed_peer.signed.run_id, stages, swarm.network.now(), seconds)


def places(swarm: SimulatedSwarm) -> list[list[PeerId]]:
    return [[peer_of(node) for node in stage_nodes(swarm, stage)] for stage in range(swarm.manifest.stages)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_go_where_the_owner_has_planned_and_nobody_else_is_believed() -> None:
    async def main() -> None:
        swarm = await settled(2, 3)
        first, second = places(swarm)
        await publish(
            swarm, plan_for(swarm, [second, first]).sign(Identity.from_seed("a stranger")), "forger"
        )
        await publish(swarm, b"nonsense", "vandal")
        await publish(swarm, plan_for(swarm, [second, first], 1.0).sign(owner_of(swarm)), "straggler")
        await asyncio.sleep(5 * LIFETIME)
        assert not events_of(swarm, "moving")
        for number in swarm.nodes:
            assert len(events_of(swarm, "plan-ignored", node=number)) == 1  # told once, whatever follows
        planned = [[*first[1:], second[0]], [*second[1:], first[0]]]
        await publish(swarm, plan_for(swarm, planned).sign(owner_of(swarm)))
        await until(lambda: len(events_of(swarm, "moved")) == 2, seconds=3600, step=1.0)
        assert [set(stage) for stage in places(swarm)] == [set(stage) for stage in planned]
        newcomer = swarm.add(9)
        await until(lambda: newcomer.public_state == "serving", step=1.0)
        await asyncio.sleep(10 * LIFETIME)
        assert len(events_of(swarm, "moved")) == 2  # and then all is well
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.timeout(300)
def test_a_newcomer_takes_the_stage_that_is_planned_for_it() -> None:
    async def main() -> None:
        swarm = await settled(2, 2)
        expected = Identity.from_seed("node", swarm.seed, 7).peer_id
        first, second = places(swarm)
        await publish(swarm, plan_for(swarm, [first, [*second, expected]]).sign(owner_of(swarm)))
        swarm.kill(next(n for n, node in swarm.nodes.items() if peer_of(node) == first[0]))
        newcomer = swarm.add(7)  # the poorest stage would be the first one
        await until(lambda: newcomer.public_state == "serving", step=1.0)
        assert peer_of(newcomer) == expected
        assert newcomer.context.stage == 1
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_plan_that_deaths_have_overtaken_keeps_nobody_in_place() -> None:
    async def main() -> None:
        swarm = await settled(2, 4)
        await publish(swarm, plan_for(swarm, places(swarm)).sign(owner_of(swarm)))
        await asyncio.sleep(2 * LIFETIME)
        kill_half(swarm, 1)
        await somebody_moved(swarm)
        await asyncio.sleep(20 * LIFETIME)
        assert [(m["source"], m["target"]) for m in events_of(swarm, "moved")] == [(0, 1)]
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_running_swarm_is_planned_for_and_keeps_copies_of_the_plan(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await settled(2, 3)
        visitor = await observer_of(swarm)
        seen = await seen_by(visitor)
        assert [peer.peer for peer in seen.peers] == [
            peer for stage in places(swarm) for peer in sorted(stage)
        ]
        sealed = planned_by(seen, owner_of(swarm), tmp_path)
        await publish(swarm, sealed)
        await asyncio.sleep(3 * LIFETIME)
        copies = await visitor.transport.get(plan_key(seen.signed.run_id), 5.0)
        assert 3 <= len(copies) <= 5
        await asyncio.sleep(3700)
        assert await visitor.transport.get(plan_key(seen.signed.run_id), 5.0)  # longer than a record lives
        await swarm.leave()

    run_swarm(main())


def planned_by(seen: LiveSwarm, owner: Identity, directory: Path) -> bytes:
    """As `noloco plan --join … --publish …` does. All links are alike: nobody has to move."""
    training = Training(seen.manifest.inner.microbatches, 16, seen.manifest.outer.inner_steps)
    problem = problem_of(seen.scenario(), "noloco", seen.manifest.stages, None, training)
    moves = moves_of(seen, problem, make_plan(problem, "anneal", Budget(evaluations=2000), 0))
    assert not moves.movers
    assert "Nobody would move" in moves.sentence()
    owner.save(directory / "run.key")
    sealed = signed_plan(seen, moves, directory, 2 * 3600)
    plan = open_plan(sealed, owner.public_key, seen.signed.run_id, seen.now)
    assert plan.places([p.peer for p in seen.peers]) == {p.peer: p.stage for p in seen.peers}
    return sealed


@pytest.mark.parametrize("is_earlier", [False, True])
def test_the_owner_ends_the_wait_of_a_stage_and_an_earlier_order_does_not(
    is_earlier: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, limits__stage_return=600.0)
        await asyncio.sleep(20)
        first, second = places(swarm)
        await publish(swarm, plan_for(swarm, [first, second]).sign(owner_of(swarm)))
        visitor = await observer_of(swarm, "owner")
        owner_of(swarm).save(tmp_path / "run.key")
        with pytest.raises(UserError, match="no stage 2"):
            await end_waits(visitor, [2], tmp_path, 3600.0)
        if is_earlier:
            await end_waits(visitor, [0], tmp_path, 3600.0)
            await asyncio.sleep(60)
        await leave(swarm, A)
        await leave(swarm, C)
        swarm.add(7, stage=0)
        await until(lambda: bool(events_of(swarm, "waiting-for-stage", 7)))
        await asyncio.sleep(60)
        assert not events_of(swarm, "begun-anew")
        assert not is_earlier or not events_of(swarm, "wait-ended")
        await end_waits(visitor, [0], tmp_path, 3600.0)
        await until(lambda: bool(events_of(swarm, "begun-anew", 7)))
        assert len(events_of(swarm, "wait-ended", 7)) == 1
        plan = await OwnersPlan(
            visitor.transport, visitor.signed, Events(swarm.network.now, lambda _: None)
        ).read()
        assert plan is not None
        assert plan.begin_anew == [0]
        assert plan.places([*first, *second]) == dict.fromkeys(first, 0) | dict.fromkeys(second, 1)
        await swarm.leave()

    run_swarm(main())


def test_a_plan_that_ends_no_wait_is_written_as_earlier_versions_wrote_it() -> None:
    key = Identity.from_seed("run")
    plan = PlacementPlan.of("r" * 32, [], 0.0, 3600.0)
    body, _ = msgpack.unpackb(plan.sign(key))
    assert msgpack.unpackb(body).keys() == {"run_id", "issued", "expires", "stages"}
    plan = PlacementPlan.of("r" * 32, [], 0.0, 3600.0, [3])
    assert open_plan(plan.sign(key), key.public_key, "r" * 32, 1.0).begin_anew == [3]
