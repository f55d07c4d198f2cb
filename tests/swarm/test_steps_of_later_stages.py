"""A replica alone in its stage does the steps of all that feed it: more than the run has. Nothing refuses that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.model.inner import learning_rate
from tests.swarm.micro import (
    events_of,
    everyone_reaches,
    micro_manifest,
    micro_swarm,
    run_swarm,
    step_of,
    until,
)
from tests.swarm.test_nothing_is_lost import RETURN, A, B, C, leave, three_friends

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


def test_a_step_is_the_runs(tmp_path: Path) -> None:
    async def main() -> None:
        long = 6 * TOTAL
        swarm = await three_friends(
            tmp_path, inner__total_steps=long, inner__warmup_steps=10, inner__clock="run"
        )
        await until(lambda: step_of(swarm.nodes[B]) > long)
        first = max(events_of(swarm, "step", number)[-1]["learning_rate"] for number in (A, C))
        inner = swarm.nodes[B].replica.manifest.inner
        steps = [step_of(swarm.nodes[number]) for number in (A, C)]
        assert max(steps) < long
        assert swarm.nodes[B].replica.run_step < long
        rate = events_of(swarm, "step", B)[-1]["learning_rate"]
        slowest, fastest = (learning_rate(inner, step) for step in (min(steps) - 40, max(steps) + 40))
        assert fastest <= rate <= slowest
        assert first > inner.min_learning_rate
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        assert all(n.replica.clock.has_ended(n.replica.step) for n in swarm.nodes.values())
        await swarm.leave()

    run_swarm(main())


def test_only_the_first_stage_ends_at_the_last_step() -> None:
    manifest = micro_manifest(inner__total_steps=TOTAL)
    assert manifest.most_steps(0) == TOTAL
    assert manifest.most_steps(1) >= 1_000 * TOTAL


@pytest.mark.long_but("wider at the end")
@pytest.mark.parametrize(
    ("widths", "changes"),
    [
        ((1, 2), {}),
        ((2, 1, 1), {"stages": 3, "model__layers": 3}),
        ((1, 2, 1), {"stages": 3, "model__layers": 3}),
        ((2, 1), {"model__tied_embeddings": True, "model__layers": 3}),
        ((2, 1), {"inner__staleness": 1}),
    ],
    ids=["wider at the end", "three stages", "wide in the middle", "a ring", "late gradients"],
)
def test_a_step_is_the_runs_in_every_shape(
    widths: tuple[int, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    async def main() -> None:
        long, apart = 200, 40
        swarm = micro_swarm(
            directory=tmp_path,
            inner__total_steps=long,
            inner__clock="run",
            limits__stage_return=RETURN,
            **changes,
        )
        await swarm.seed_peer.start()
        places = [stage for stage, width in enumerate(widths) for _ in range(width)]
        for number, stage in enumerate(places):
            swarm.add(number, stage=stage)
        await everyone_reaches(swarm, 10)
        await until(
            lambda: max(step_of(node) for node in swarm.nodes.values() if node.stage == 0) > long // 2
        )
        first = [step_of(node) for node in swarm.nodes.values() if node.stage == 0]
        later = [node.replica.run_step for node in swarm.nodes.values() if node.stage]
        assert min(first) - apart <= min(later) <= max(later) <= max(first) + apart
        await until(lambda: all(node.public_state == "finished" for node in swarm.nodes.values()))
        assert all(n.replica.clock.has_ended(n.replica.step) for n in swarm.nodes.values())
        await swarm.leave()

    run_swarm(main())
