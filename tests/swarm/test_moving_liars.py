"""Claims to move by those who do not move keep nobody else in place for long."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.membership.moving import LONGEST_CLAIM
from protocol.records.announcement import Announcement, Claim, moving_key, stage_key
from tests.swarm.micro import events_of, guest_of, run_swarm, until
from tests.swarm.movers import LIFETIME, kill_half, settled


async def claims_for_ever(swarm: SimulatedSwarm, with_record: bool) -> None:
    """Somebody that always is about to move from stage 0 to stage 1, with a record of stage 0 or without."""
    rpc = await guest_of(swarm, "claimant")
    transport, run_id = rpc.transport, swarm.seed_peer.signed.run_id
    await transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
    while True:
        now = transport.now()
        claim = Claim(since=now - 60.0, source=0, target=1)
        await transport.put(moving_key(run_id), claim.to_bytes(), 600.0, 5.0)
        if with_record:
            record = Announcement(stage=0, state="serving", since=now - 600.0)
            await transport.put(stage_key(run_id, 0), record.to_bytes(), 600.0, 5.0)
        await asyncio.sleep(30.0)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("with_record", "longest"), [(False, 10 * LIFETIME), (True, LONGEST_CLAIM + 10 * LIFETIME)]
)
def test_claims_of_somebody_who_stays_do_not_freeze_the_others(with_record: bool, longest: float) -> None:
    """Failed before: anybody's claim froze all moves for as long as it was made again."""

    async def main() -> None:
        swarm = await settled(2, 3)
        claimant = asyncio.get_running_loop().create_task(claims_for_ever(swarm, with_record))
        await asyncio.sleep(5)
        kill_half(swarm, 1)
        began = asyncio.get_running_loop().time()
        await until(lambda: bool(events_of(swarm, "moving")), seconds=longest, step=1.0)
        assert {(event["source"], event["target"]) for event in events_of(swarm, "moving")} == {(0, 1)}
        print(f"a replica moved after {asyncio.get_running_loop().time() - began:.0f} s")
        claimant.cancel()
        await asyncio.gather(claimant, return_exceptions=True)
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
