"""A move is decided again once the node has withdrawn: it is called off where it would lose more than it gains."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.membership.moving import Mover
from node.membership.placement import Call
from node.process.daemon import Node
from tests.swarm.micro import (
    events_of,
    everyone_goes_on,
    numbers_of_stage,
    run_swarm,
    step_of,
    until,
)
from tests.swarm.movers import LIFETIME, all_train_on, one_moves, settled
from tests.swarm.test_nothing_is_lost import A, B, C, leave, three_friends


def call_away(monkeypatch: pytest.MonkeyPatch, node: Node, *, was_empty: bool) -> asyncio.Event:
    """Have the node take itself for called to stage 1 once the returned event is set."""
    go = asyncio.Event()

    async def called_away(self: Node, called: asyncio.Event) -> None:
        if self is not node or self._mover is not None:
            await asyncio.Event().wait()
        await go.wait()
        self._mover = Mover(self.member.membership, self.member.plan, self.member.random())
        self._mover._call, self._target = Call(1, was_empty), 1
        called.set()

    monkeypatch.setattr(Node, "_called_away", called_away)
    return go


def test_a_stage_that_is_served_again_needs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, step=10)
        await leave(swarm, A)
        node = swarm.add(A, stage=0)
        go = call_away(monkeypatch, node, was_empty=True)
        await everyone_goes_on(swarm)
        step = step_of(node)
        go.set()
        await until(lambda: bool(events_of(swarm, "move-called-off", A)))
        await until(lambda: node.stage == 0 and node.public_state == "serving")
        await everyone_goes_on(swarm)
        assert step_of(node) >= step
        assert not events_of(swarm, "moved")
        await swarm.leave()

    run_swarm(main())


def test_nobody_goes_whose_stage_has_lost_its_others_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, step=10)
        await leave(swarm, A)
        node = swarm.add(A, stage=0)
        go = call_away(monkeypatch, node, was_empty=False)
        await everyone_goes_on(swarm)
        await leave(swarm, C)
        go.set()
        await until(lambda: bool(events_of(swarm, "move-called-off", A)))
        await everyone_goes_on(swarm)
        assert (node.stage, swarm.nodes[B].stage) == (0, 1)
        await swarm.leave()

    run_swarm(main())


def test_a_move_that_is_needed_takes_place_and_the_old_stage_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, step=10)
        await leave(swarm, A)
        node = swarm.add(A, stage=0)
        go = call_away(monkeypatch, node, was_empty=False)
        await everyone_goes_on(swarm)
        at = step_of(node)
        go.set()
        await until(lambda: bool(events_of(swarm, "moved", A)))
        await everyone_goes_on(swarm)
        assert node.surroundings.state is not None
        kept = {one.stage: one.step for one in node.surroundings.state.kept(node.signed.run_id)}
        assert kept.keys() == {0, 1}
        assert kept[0] >= at
        await swarm.leave()

    run_swarm(main())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_stage_that_died_out_is_taken_up_again_whoever_comes_first(tmp_path: Path) -> None:
    """The mover and the one that comes back meet at the stage: it goes on from what the second has on its disk."""

    async def main() -> None:
        swarm = await settled(2, 3, directory=tmp_path)
        back = numbers_of_stage(swarm, 1)[0]
        await asyncio.sleep(40 * LIFETIME)
        for number in numbers_of_stage(swarm, 1):
            swarm.kill(number)
        began = len(events_of(swarm, "initialised"))
        await one_moves(swarm)
        swarm.add(back)
        await all_train_on(swarm)
        assert len(events_of(swarm, "initialised")) == began
        assert not events_of(swarm, "begun-anew")
        assert events_of(swarm, "restored", back)
        await swarm.leave()

    run_swarm(main())
