"""A replica alone in its stage does the steps of all that feed it: more than the run has. Nothing refuses that."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.swarm.micro import events_of, micro_manifest, run_swarm, step_of, until
from tests.swarm.test_nothing_is_lost import A, B, C, leave, three_friends

TOTAL = 60  # inner steps of the run
D = 3  # a second replica of stage 1, later


def test_all_stop_and_go_on_when_a_stage_is_beyond_the_last_step(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, inner__total_steps=TOTAL)
        await until(lambda: step_of(swarm.nodes[B]) > TOTAL)
        assert step_of(swarm.nodes[A]) < TOTAL
        at = step_of(swarm.nodes[B])
        for number in (A, C, B):
            await leave(swarm, number)
        for number, stage in ((B, 1), (A, 0), (C, 0)):
            swarm.add(number, stage=stage)
        await until(lambda: len(events_of(swarm, "restored")) == 3)
        assert events_of(swarm, "restored", B)[0]["step"] >= at
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        assert len(events_of(swarm, "initialised")) == 3, "each began from the seed once, at the very first"
        await swarm.leave()

    run_swarm(main())


def test_a_second_replica_takes_the_state_of_one_beyond_the_last_step(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await three_friends(tmp_path, inner__total_steps=TOTAL)
        await until(lambda: step_of(swarm.nodes[B]) > TOTAL)
        at = step_of(swarm.nodes[B])
        swarm.add(D, stage=1)
        await until(lambda: swarm.nodes[D].public_state == "serving")
        assert not events_of(swarm, "initialised", D)
        assert step_of(swarm.nodes[D]) >= at
        await asyncio.sleep(1)
        await swarm.leave()

    run_swarm(main())


def test_only_the_first_stage_ends_at_the_last_step() -> None:
    manifest = micro_manifest(inner__total_steps=TOTAL)
    assert manifest.most_steps(0) == TOTAL
    assert manifest.most_steps(1) >= 1_000 * TOTAL
