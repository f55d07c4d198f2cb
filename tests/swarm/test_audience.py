"""How often members are asked while somebody watches a board and while nobody does, under the virtual clock."""

from __future__ import annotations

import asyncio

from bootstrap.dashboard.collector import IDLE_SECONDS, LOOK_SECONDS, Audience
from bootstrap.dashboard.running import watched
from tests.made_up_members import MadeUpSwarm
from tests.swarm.micro import micro_manifest, run_swarm, until

SECONDS = 100.0


def test_members_are_asked_seldom_until_somebody_watches_and_again_when_nobody_does() -> None:
    async def main() -> None:
        loop, audience = asyncio.get_running_loop(), Audience()
        swarm = MadeUpSwarm(micro_manifest(limits__record_lifetime=600.0), loop.time, age=100.0)
        await swarm.start(6)

        async def asked() -> float:
            """Times that each member is asked in `SECONDS`."""
            before = sum(member.asked for member in swarm.members)
            await asyncio.sleep(SECONDS)
            return (sum(member.asked for member in swarm.members) - before) / len(swarm.members)

        async with watched(await swarm.observer(), audience) as board:
            await until(lambda: board.now.members == 6)
            assert (
                await asked() <= 2 * SECONDS / IDLE_SECONDS
            )  # records are read as often, and then they are asked
            with audience.watching():
                seen = board.now.time
                await until(lambda: board.now.time > seen, LOOK_SECONDS + 1.0)
                assert await asked() >= 0.9 * SECONDS / LOOK_SECONDS
            await asyncio.sleep(2 * LOOK_SECONDS)
            assert await asked() <= 2 * SECONDS / IDLE_SECONDS

    run_swarm(main())
