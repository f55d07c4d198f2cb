"""A node that gives a part of its device gets as much less to do, and is never taken for stale."""

from __future__ import annotations

import asyncio

import pytest

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.compute import Priority
from tests.swarm.micro import WIDE, events_of, micro_corpus, micro_manifest, run_swarm, until

SECONDS = 300.0
SHARE = 0.5
FIRST, LAST = range(6), range(6, 10)  # the numbers of the replicas of the two stages
GIVES_HALF = 8
LIGHT = {"inner__microbatches": 8, "inner__sequences": 1, "data__sequence_tokens": 16}


def work_seconds(stage: int, priority: Priority) -> float:
    """The last stage is the one that limits the swarm: all of its replicas have work all the time."""
    if priority in (Priority.OPTIMIZER, Priority.SERVE, Priority.SNAPSHOT):
        return 0.002
    return 0.2 if stage else 0.02


@pytest.mark.timeout(600)
@pytest.mark.long
@pytest.mark.parametrize("pace", ["steps", "time"])
def test_half_of_a_device_gets_half_of_the_microbatches_and_its_rounds_count(pace: str) -> None:
    async def main() -> None:
        manifest = micro_manifest(
            stages=2, inner__total_steps=100_000, outer__inner_steps=10, outer__pace=pace, **LIGHT
        )
        swarm = SimulatedSwarm(manifest, micro_corpus(), 3, WIDE, seconds=work_seconds)
        await swarm.seed_peer.start()
        for number in (*FIRST, *LAST):
            swarm.add(number, stage=int(number in LAST))
        await until(lambda: all(node.public_state == "serving" for node in swarm.nodes.values()))
        swarm.nodes[GIVES_HALF].context.compute.duty.share = SHARE
        await asyncio.sleep(100.0)  # until the others know its speed
        before = {number: swarm.nodes[number].context.counters.received for number in LAST}
        began = len(swarm.events)
        await asyncio.sleep(SECONDS)
        del swarm.events[:began]
        got = {number: swarm.nodes[number].context.counters.received - before[number] for number in LAST}
        equals = [got[number] for number in LAST if number != GIVES_HALF]
        share = got[GIVES_HALF] / (sum(equals) / len(equals))
        rounds = {number: events_of(swarm, "round", number) for number in LAST}
        partners = [round_["partner"] for round_ in rounds[GIVES_HALF]]
        met = sum(partner is not None for partner in partners)
        print(f"pace {pace}: {got}; it got {share:.2f} of its equals' microbatches")
        print(f"{met} of its {len(partners)} rounds with a partner")
        assert share == pytest.approx(SHARE, abs=0.1)
        assert len(partners) >= 5
        assert met >= 0.8 * len(partners)
        assert not events_of(swarm, "downloaded", GIVES_HALF)
        assert not events_of(swarm, "behind", GIVES_HALF)
        peer = swarm.nodes[GIVES_HALF].transport.peer_id
        met_by_others = [r for n in LAST if n != GIVES_HALF for r in rounds[n] if r["partner"] == peer]
        assert met_by_others
        await swarm.leave()

    run_swarm(main())
