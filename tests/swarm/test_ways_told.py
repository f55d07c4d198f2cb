"""A node's record follows its ways in at once: others would look for it where nobody passes anything on."""

from __future__ import annotations

import asyncio

from node.membership.discovery import ANNOUNCEMENTS_PER_LIFETIME, POLLS_PER_LIFETIME
from protocol.records.announcement import Announcement, stage_key
from protocol.records.identity import Identity
from tests.swarm.micro import FOREVER, guest_of, micro_swarm, run_swarm, until

LIFETIME = 600.0


def test_the_record_names_another_way_in_long_before_it_would_be_renewed() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER, limits__record_lifetime=LIFETIME)
        swarm.seconds = lambda stage, priority: 20.0  # it is about records: little is trained
        await swarm.seed_peer.start()
        node = swarm.add(0, stage=0, relay=False)
        swarm.add(1, stage=1)
        await until(lambda: node.public_state == "serving", seconds=LIFETIME)
        await asyncio.sleep(1)  # it says that it serves after it does
        guest = await guest_of(swarm)
        await guest.transport.connect(swarm.seed_peer.transport.addresses(), 5.0)
        for name in ("one", "other"):
            way = Identity.from_seed(name).peer_id
            node.transport.ways_in = (way,)
            looked = LIFETIME / POLLS_PER_LIFETIME + 5
            assert looked < LIFETIME / ANNOUNCEMENTS_PER_LIFETIME  # after which it is renewed anyway
            await asyncio.sleep(looked)
            records = await guest.transport.get(stage_key(swarm.seed_peer.signed.run_id, 0), 5.0)
            told = [Announcement.read(record) for record in records]
            assert [one.through for one in told if one.stage == 0] == [[way]]
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
