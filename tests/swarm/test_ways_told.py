"""A node's record follows its ways in at once: others would look for it where nobody passes anything on."""

from __future__ import annotations

from protocol.records.identity import Identity
from tests.swarm.micro import FOREVER, micro_swarm, run_swarm, until


def test_others_know_of_another_way_in_long_before_the_record_is_renewed() -> None:
    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER, limits__record_lifetime=600.0)
        swarm.seconds = lambda stage, priority: 20.0  # it is about records: little is trained
        await swarm.seed_peer.start()
        node, *others = [swarm.add(number, stage=number % 2, relay=False) for number in range(3)]
        await until(
            lambda: all(each.public_state == "serving" for each in swarm.nodes.values()), seconds=600
        )
        peer = node.transport.peer_id
        for name in ("one", "other"):
            way = Identity.from_seed(name).peer_id
            node.transport.ways_in = (way,)

            def knows(other: object, way: str = way) -> bool:
                seen = other.view.record_of(peer)  # type: ignore[attr-defined]
                return seen is not None and way in seen.announcement.through

            await until(lambda: all(map(knows, others)), seconds=110.0)  # it is renewed after 200 s
        for number in list(swarm.nodes):
            swarm.kill(number)
        await swarm.leave()

    run_swarm(main())
