"""What a visitor sees of a swarm that changes while it looks."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.inspect.observer import PAUSE_SECONDS, SURVEY_SECONDS
from protocol.errors import JoinError
from tests.swarm.micro import FOREVER, micro_swarm, observer_of, peer_of, run_swarm, until


def test_a_visitor_waits_a_little_for_a_stage_that_nobody_serves_yet() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        first = swarm.add(0, stage=0)
        await until(lambda: first.public_state == "serving")
        visitor = await observer_of(swarm)
        told: list[str] = []
        visitor._tell = told.append
        survey = asyncio.create_task(visitor.survey())
        await asyncio.sleep(SURVEY_SECONDS / 3)
        assert not survey.done()
        assert told == ["Found nobody at stage 1 so far; looking for 30 s at most."]
        second = swarm.add(1, stage=1)
        assert {seen.member.peer for seen in await survey} == {peer_of(first), peer_of(second)}
        await swarm.leave()

    run_swarm(main())


def test_a_visitor_does_not_wait_when_every_stage_has_somebody_nor_for_ever() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.start(1)
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
        visitor = await observer_of(swarm)
        loop = asyncio.get_running_loop()
        came = loop.time()
        assert len(await visitor.survey()) == 2
        assert loop.time() - came < PAUSE_SECONDS
        swarm.kill(1)
        await asyncio.sleep(2 * swarm.manifest.limits.record_lifetime)
        came = loop.time()
        (left,) = await visitor.survey()
        assert left.member.announcement.stage == 0
        assert SURVEY_SECONDS <= loop.time() - came < SURVEY_SECONDS + 5.0
        with pytest.raises(JoinError, match="no record of stage 1 of 2 in 3"):
            await visitor.routes()
        await swarm.leave()

    run_swarm(main())
