"""Who downloads a stage's state again: a replica that missed rounds, once, and nobody at another's word."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from node.process.daemon import Node
from protocol.errors import NolocoError, Refused
from protocol.ground import Record
from protocol.messages.state import GetStateIndex, GetStatePiece, StateIndex
from protocol.messages.training import Propose
from protocol.records.announcement import Announcement, stage_key
from protocol.rpc.rpc import Answer, Request, Rpc
from tests.swarm.members import SOON
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    events_of,
    everyone_goes_on,
    guest_of,
    micro_corpus,
    micro_manifest,
    peer_of,
    run_swarm,
    until,
)

ONE_STAGE = {"stages": 1, "inner__microbatches": 1, "inner__sequences": 1, "data__sequence_tokens": 16}
STEP_SECONDS = 0.25


async def one_stage(replicas: int, rounds: int) -> SimulatedSwarm:
    """One that has trained until everybody has ended so many rounds."""
    swarm = SimulatedSwarm(
        micro_manifest(inner__total_steps=FOREVER, **ONE_STAGE), micro_corpus(), 1, WIDE, seconds=work_seconds
    )
    await swarm.start(replicas)
    await until(lambda: all(len(events_of(swarm, "round", n)) >= rounds for n in range(replicas)))
    return swarm


def work_seconds(stage: int, priority: Priority) -> float:
    return 0.005 if priority in (Priority.OPTIMIZER, Priority.SERVE) else STEP_SECONDS - 0.005


async def announce_liar(swarm: SimulatedSwarm, liar: Rpc, round_: int) -> None:
    await liar.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    record = Announcement(
        stage=0, state="serving", since=0.0, step=9 * round_, round=round_, tokens_per_second=1.0
    )
    key = stage_key(swarm.seed_peer.signed.run_id, 0)
    await liar.transport.put(key, record.to_bytes(), 1_000.0, 5.0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_liar_makes_no_mature_replica_download() -> None:
    """It refuses proposals with "stale", proposes with round 10^6, and says so in its record."""

    async def main() -> SimulatedSwarm:
        swarm = await one_stage(3, rounds=6)
        liar = await guest_of(swarm, "liar")
        await liar.start()
        asked, size = 0, swarm.nodes[0].replica.parameters

        async def refuse(request: Request) -> Answer:
            nonlocal asked
            asked += 1
            raise Refused("stale", "download this stage's state first")

        async def give_nonsense(request: Request) -> Answer:
            return Answer(
                StateIndex(stage=0, step=9 * 10**6, round=10**6, parameters=size, piece_parameters=2**18)
            )

        async def give_garbage(request: Request) -> Answer:
            raise AssertionError("somebody wants its weights")

        liar.handle(Propose.answered_by(refuse))
        liar.handle(GetStateIndex.answered_by(give_nonsense))
        liar.handle(GetStatePiece.answered_by(give_garbage))
        await announce_liar(swarm, liar, 10**6)
        rounds = len(events_of(swarm, "round"))
        for number in range(20):
            for node in swarm.nodes.values():
                message = Propose(stage=0, round=10**6, pair=f"{number}", **{**SOON, "due_in": 9.0})
                with contextlib.suppress(NolocoError):
                    await liar.call(peer_of(node), message, deadline=1.0)
            await asyncio.sleep(0.3)
        assert asked > 0
        assert len(events_of(swarm, "round")) >= rounds + 9, "the honest ones train on"
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    assert not events_of(swarm, "downloaded")
    assert not events_of(swarm, "behind")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_who_began_from_the_seed_unseen_downloads_once_and_belongs() -> None:
    async def main() -> SimulatedSwarm:
        swarm = await one_stage(2, rounds=20)
        late = swarm.add(9, stage=0)
        sees, late.transport.get = late.transport.get, sees_nothing  # type: ignore[method-assign]
        await until(lambda: late.public_state == "serving" and late.replica.step >= 4)
        late.transport.get = sees  # type: ignore[method-assign]
        return await trained_on(swarm, late)

    swarm = run_swarm(main())
    [downloaded] = events_of(swarm, "downloaded")
    assert downloaded["node"] == 9
    assert downloaded["round"] >= 20
    [behind] = events_of(swarm, "behind")
    assert "began alone" in behind["reason"]


async def sees_nothing(key: str, deadline: float, *, copies: int = 2) -> list[Record]:
    return []


async def trained_on(swarm: SimulatedSwarm, node: Node) -> SimulatedSwarm:
    """Until the node has met everybody, and a while longer."""
    before = dict(node.context.counters.partners)
    others = [peer_of(other) for other in swarm.nodes.values() if other is not node]
    now = node.context.counters.partners
    await until(lambda: all(now.get(peer, 0) > before.get(peer, 0) for peer in others), 400.0)
    await everyone_goes_on(swarm, 20)
    await swarm.leave()
    return swarm


@pytest.mark.long
@pytest.mark.timeout(300)
def test_after_a_partition_both_halves_average_and_nobody_downloads() -> None:
    async def main() -> SimulatedSwarm:
        swarm = await one_stage(3, rounds=4)
        peers = [peer_of(node) for node in swarm.nodes.values()]
        swarm.network.partition(peers[:1], peers[1:])
        await asyncio.sleep(70.0)
        swarm.network.heal()
        return await trained_on(swarm, swarm.nodes[0])

    swarm = run_swarm(main())
    assert not events_of(swarm, "downloaded")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_that_was_frozen_for_long_refreshes_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> SimulatedSwarm:
        swarm = await one_stage(3, rounds=4)
        frozen, thawed = swarm.nodes[0], asyncio.Event()
        run = frozen.context.compute.run

        async def stuck(*work: Any) -> Any:
            await thawed.wait()
            return await run(*work)

        swarm.network.freeze(peer_of(frozen))
        monkeypatch.setattr(frozen.context.compute, "run", stuck)
        await asyncio.sleep(80.0)
        swarm.network.thaw(peer_of(frozen))
        thawed.set()
        await until(lambda: bool(events_of(swarm, "downloaded")))
        await everyone_goes_on(swarm, 20)
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    [behind] = events_of(swarm, "behind")
    assert behind["node"] == 0
    assert "stood still" in behind["reason"]
    [downloaded] = events_of(swarm, "downloaded")
    assert downloaded["node"] == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_slow_node_that_is_started_again_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    """The others are rounds ahead of it, as they always were."""

    async def main() -> SimulatedSwarm:
        swarm = SimulatedSwarm(
            micro_manifest(inner__total_steps=FOREVER, **ONE_STAGE),
            micro_corpus(),
            1,
            WIDE,
            directory=tmp_path,
            seconds=work_seconds,
        )
        await swarm.seed_peer.start()
        for number, speed in enumerate((1.0, 1.0, 0.1)):
            swarm.add(number, stage=0, speed=speed)
        await until(lambda: len(events_of(swarm, "checkpoint", 2)) >= 3)
        swarm.kill(2)
        slow = swarm.add(2, stage=0, speed=0.1)
        await until(lambda: slow.public_state == "serving" and bool(slow.context.counters.partners))
        ahead = swarm.nodes[0].replica.round - slow.replica.round
        assert ahead > 10
        await swarm.leave()
        return swarm

    swarm = run_swarm(main())
    assert events_of(swarm, "restored", 2)
    assert not events_of(swarm, "downloaded")
