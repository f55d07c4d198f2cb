"""What goes wrong on the way to another stage: deaths, races, failed downloads, too little memory, Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.membership.capacity import Move, Peer, next_move
from node.membership.moving import Mover
from node.membership.placement import Moves, Survey
from node.membership.stage_choice import Abilities
from node.state.download import download_state
from protocol.errors import JoinError, ResourceError
from protocol.ground import PeerId
from tests.swarm.micro import events_of, run_swarm, stage_nodes, until
from tests.swarm.movers import (
    all_train_on,
    at_rest,
    best_throughput,
    capacities,
    kill_half,
    never_empty,
    one_moves,
    settled,
    somebody_moved,
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_mover_that_dies_on_its_way_is_replaced_by_another() -> None:
    async def main() -> None:
        swarm = await settled(3, 4)
        kill_half(swarm, 1)
        watch = asyncio.get_running_loop().create_task(never_empty(swarm))
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await until(lambda: mover.stage == 1 and mover.public_state == "joining", 300, 0.01)
        swarm.kill(number)
        assert not events_of(swarm, "moved")
        await somebody_moved(swarm)
        await at_rest(swarm)
        assert len(events_of(swarm, "moved")) == 1
        assert min(capacities(swarm)) >= 0.8 * best_throughput(swarm)
        await all_train_on(swarm)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert watch.cancelled()
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_of_several_that_would_move_at_the_same_moment_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica of the richest stage takes itself for the one to go, and none sees that another has begun."""
    asker: ContextVar[PeerId] = ContextVar("asker")
    has_claimed: ContextVar[bool] = ContextVar("has_claimed", default=False)
    survey_all, lease, read_leases = Mover.survey_all, Moves._lease, Mover.read_leases
    claims = list[PeerId]()

    async def marked(self: Mover, *args: Any) -> Survey:
        asker.set(self._transport.peer_id)
        return await survey_all(self, *args)

    async def counted(self: Moves, *args: Any) -> bool:
        claims.append(self.me)
        token = has_claimed.set(True)
        try:
            return await lease(self, *args)
        finally:
            has_claimed.reset(token)

    async def unseen(self: Mover, peers: Sequence[Peer]) -> Any:
        return await read_leases(self, peers) if has_claimed.get() else []

    def selfish(peers: Sequence[Peer], *args: Any, **named: Any) -> Move | None:
        move, mine = next_move(peers, *args, **named), [p for p in peers if p.peer == asker.get()]
        if move is not None and mine and mine[0].stage == move.source:
            return replace(move, peer=asker.get())
        return move

    monkeypatch.setattr(Mover, "survey_all", marked)
    monkeypatch.setattr(Moves, "_lease", counted)
    monkeypatch.setattr(Mover, "read_leases", unseen)
    monkeypatch.setattr("node.membership.placement.next_move", selfish)
    monkeypatch.setattr("node.membership.placement.PAUSES", (0.5, 0.5))

    async def main() -> None:
        swarm = await settled(2, 3)
        kill_half(swarm, 1)
        await somebody_moved(swarm)
        await at_rest(swarm)
        assert len(set(claims)) > 1
        assert [(m["source"], m["target"]) for m in events_of(swarm, "moved")] == [(0, 1)]
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_download_that_fails_sends_the_mover_back_to_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 3

    async def flaky(*args: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise JoinError("The donors are gone.")
        return await download_state(*args)

    async def main() -> None:
        swarm = await settled(2, 3)
        kill_half(swarm, 1)
        monkeypatch.setattr("node.service.trainer.download_state", flaky)
        number = (await one_moves(swarm))["node"]
        await somebody_moved(swarm)
        assert failures < 0
        assert [event["stage"] for event in events_of(swarm, "move-failed")] == [1]
        assert events_of(swarm, "chose-stage", node=number)[-1]["stage"] == 1
        await at_rest(swarm)
        assert [len(stage_nodes(swarm, stage)) for stage in (0, 1)] == [2, 2]
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_for_which_the_stage_is_too_large_stays_and_another_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require, too_small = Abilities.require, list[Abilities]()

    def of_the_first(self: Abilities, stage: int, freed: int = 0, leaving: int | None = None) -> None:
        if freed and not too_small:
            too_small.append(self)
        if freed and self in too_small:
            raise ResourceError("Stage 1 needs 900 GiB of memory.")
        require(self, stage, freed, leaving)

    async def main() -> None:
        swarm = await settled(2, 3)
        kill_half(swarm, 1)
        monkeypatch.setattr(Abilities, "require", of_the_first)
        await somebody_moved(swarm)
        [stays], [moved] = events_of(swarm, "stays"), events_of(swarm, "moved")
        assert stays["node"] != moved["node"]
        assert swarm.nodes[stays["node"]].context.stage == 0
        await all_train_on(swarm)
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ctrl_c_on_the_way_to_another_stage_leaves_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await settled(2, 3, directory=tmp_path)
        kill_half(swarm, 1)
        for node in swarm.nodes.values():
            await node.checkpoints.save()
        number = (await one_moves(swarm))["node"]
        mover = swarm.nodes[number]
        await until(lambda: mover.stage == 1 and mover.public_state == "joining", 300, 0.01)
        mover.stop()
        await asyncio.wait_for(asyncio.shield(swarm.tasks[number]), 30)
        assert mover.surroundings.state is not None
        saved = mover.surroundings.state.checkpoint(mover.signed.run_id)
        assert saved is not None
        assert (saved.stage, saved.state.step > 0) == (0, True)  # what was whole, not what was half there
        await swarm.leave()

    run_swarm(main())
