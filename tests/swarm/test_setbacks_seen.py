"""What visitors of a swarm see of stages that wait for their state, were begun anew, or fell back."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from bootstrap.dashboard.running import watched
from bootstrap.inspect.status import Watching, as_json
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.context import statistics
from node.service import service
from node.watch.words import waiting_sentence
from protocol.messages.peers import Awaited, LossBest, NodeStats
from protocol.records.announcement import State
from protocol.records.identity import Identity
from tests.made_up_members import MadeUpMember, MadeUpSwarm
from tests.pretrained import saved_model
from tests.swarm.micro import (
    FOREVER,
    WIDE,
    events_of,
    micro_corpus,
    micro_manifest,
    observer_of,
    run_swarm,
    training,
    until,
)
from tests.swarm.test_from_checkpoint import manifest_for

LOST = Identity.from_seed("lost").peer_id


def test_a_node_that_waits_for_its_stage_is_seen_by_status_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that joins answers: what it waits for is in its numbers."""
    saved_model(tmp_path / "model")
    manifest = manifest_for(tmp_path / "model", inner__total_steps=FOREVER)

    def waiting(context: Any, replica: Any, state: State, since: float, *_: Any) -> NodeStats:
        stats, now = statistics(context, replica, state, since), context.transport.now()
        awaited = Awaited(context.stage, 486, LOST, now - 180.0, now + 600.0)
        return stats.model_copy(update={"awaited": awaited if state == "joining" else None})

    monkeypatch.setattr(service, "statistics", waiting)

    async def main() -> None:
        swarm = SimulatedSwarm(manifest, micro_corpus(), seed=1, link=WIDE)
        await swarm.start(1)
        await until(lambda: len(events_of(swarm, "no-weights")) == 2)
        visitor = await observer_of(swarm)
        status = await Watching(visitor).look(is_first=True)
        found = {f.stage: f for f in status.findings if f.kind == "waiting"}
        assert set(found) == {0, 1}
        (stats,) = status.seen.stats(0)
        assert (stats.state, stats.awaited is None) == ("joining", False)
        assert stats.awaited is not None
        assert f"S{found[0].sentence[1:]}." == waiting_sentence(stats.awaited, stats.time or 0.0)
        assert [each["awaited"][1] for each in as_json(status)["nodes"]] == [486, 486]  # type: ignore[index, attr-defined]
        async with watched(await observer_of(swarm, "page")) as board:
            await until(lambda: sum("had it 3 min ago" in remark.text for remark in board.remarks) == 2)
        await swarm.leave()

    run_swarm(main())


def test_a_page_sees_a_step_that_falls_back_and_the_beginning_that_it_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        swarm = MadeUpSwarm(micro_manifest(), asyncio.get_running_loop().time, age=500.0)
        await swarm.start(4)
        observer = await swarm.observer()
        watching = Watching(observer)
        assert not {"step-fell-back", "begun-anew"} & {f.kind for f in (await watching.look()).findings}
        begun = observer.transport.now()
        for member in swarm.members[::2]:
            _begin_anew(member, begun, monkeypatch)
        await swarm.renew()
        found = {f.kind: f for f in (await watching.look()).findings}
        assert found["begun-anew"].time == begun
        assert found["step-fell-back"].stage == found["begun-anew"].stage == 0
        assert found["step-fell-back"].sentence.startswith("stage 0: its step fell back from 1,0")
        once = {f.kind: f for f in (await Watching(observer).look()).findings}  # who has seen nothing before
        assert "begun-anew" in once
        assert "step-fell-back" not in once

    run_swarm(main())


def _begin_anew(member: MadeUpMember, begun: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = member.stats
    changes = {"step": 3, "beginning": 1, "begun": begun}
    monkeypatch.setattr(member, "stats", lambda seconds=None: before(seconds).model_copy(update=changes))


def test_nodes_know_their_best_loss_and_a_jump_above_it_is_seen() -> None:
    async def main() -> None:
        swarm = await training(1, step=40, inner__total_steps=FOREVER)
        visitor = await observer_of(swarm)
        told = {s.stats.stage: s.stats for s in await visitor.look() if s.stats is not None}
        best = told[1].best
        assert isinstance(best, LossBest)
        assert best.loss == pytest.approx(told[1].loss or 0.0, rel=0.2)
        assert visitor.transport.now() - 60.0 < best.time <= visitor.transport.now()
        for member in swarm.nodes.values():
            context = member.context
            for _ in range(30):
                context.counters.losses.note(context.view.elapsed(), 2.0 * best.loss)
        found = {f.kind: f for f in (await Watching(visitor).look()).findings}
        assert re.match(r"loss \d+\.\d\d, was \d\.\d\d at ", found["loss-jumped"].sentence)
        assert "learning" not in found
        await swarm.leave()

    run_swarm(main())
