"""An exception where nobody expects one: it is told, and training goes on or the node ends with a sentence."""

from __future__ import annotations

import asyncio
import importlib
import logging
from pathlib import Path
from typing import Any

import pytest

from bootstrap.lab.in_memory.virtual_time import run_virtual
from bootstrap.lab.simulation.swarm import WORK_SECONDS
from protocol.errors import NolocoError
from tests.swarm.micro import FOREVER, everyone_goes_on, everyone_reaches, micro_swarm

SLOWLY = 10  # times the usual seconds of a piece of work: virtual minutes in few of them
# where an exception is thrown, and for parts that are kept running, the name that they are told by
PARTS = [
    ("node.membership.discovery.Discovery.refresh", "Discovery"),
    ("node.links.links.Links.choose", "Measuring links"),
    ("node.state.checkpoints.Checkpoints.save", "Saving checkpoints"),
    ("node.model.snapshot.Snapshots.begin", "Saving checkpoints"),
    ("node.membership.moving.Mover.survey_all", "Watching for stages in need"),
]
TASKS = [
    "node.rounds.matchmaker.Matchmaker._ask",
    "node.rounds.handshake.Handshake.ready",
    "node.rounds.pairing.Pairing.on_proposal",
    "node.rounds.exchanges.Exchanges.finish",
    "node.rounds.contribution.OutgoingUpdate.encode",
    "node.rounds.exchanges.Exchanges.receive",
    "node.pipeline.pipeline.Pipeline.train",
    "node.pipeline.routing.Router.choose_some",  # with one peer alone nothing is chosen
    "node.model.stage_work.StageWork.forward",
    "node.model.stage_work.StageWork.backward",
    "node.model.stage_work.StageWork.last_stage",
    "node.model.replica.Replica.inner_step",
    "node.model.replica.Replica._finish",
    "node.data.prefetch.Feed.take",
    "protocol.rpc.rpc.Rpc._dispatch",
]


class Thrown:
    """The first `times` calls of a method raise. Mutable state: how often it has."""

    def __init__(self, place: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        module, name, method = place.rsplit(".", 2)
        owner = getattr(importlib.import_module(module), name)
        original, self.count = getattr(owner, method), 0

        def throw() -> None:
            if self.count < times:
                self.count += 1
                raise RuntimeError("thrown by a test")

        if asyncio.iscoroutinefunction(original):

            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                throw()
                return await original(*args, **kwargs)

            replacement: Any = asynchronous
        else:

            def synchronous(*args: Any, **kwargs: Any) -> Any:
                throw()
                return original(*args, **kwargs)

            replacement = synchronous
        monkeypatch.setattr(owner, method, replacement)


async def _training(directory: Path) -> Any:
    """Two stages of two nodes that have begun to train; the stages are their own choice, so that they may move."""
    swarm = micro_swarm(directory=directory, inner__total_steps=FOREVER, inner__microbatches=2)
    swarm.seconds = lambda stage, priority: SLOWLY * WORK_SECONDS[priority]
    await swarm.seed_peer.start()
    for number in range(4):
        swarm.add(number, checkpoint_minutes=0.05)
        await asyncio.sleep(2)
    await everyone_reaches(swarm, 3)
    return swarm


@pytest.mark.long
@pytest.mark.parametrize(("place", "part"), PARTS)
def test_a_part_that_fails_is_told_and_started_again(
    place: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        swarm = await _training(tmp_path)
        thrown = Thrown(place, 2, monkeypatch)
        await asyncio.sleep(120)
        assert thrown.count == 2
        failed = [event for event in swarm.events if event["event"] == "part-failed"]
        assert [event["part"] for event in failed].count(part.lower()) == 2
        parts = [
            p for node in swarm.nodes.values() for p in node.health()["parts"] if p["part"] == part.lower()
        ]
        assert sum(p["restarts"] for p in parts) >= 1  # a node that has moved since starts again
        assert all(p["state"] == "running" for p in parts)
        await everyone_goes_on(swarm)
        await swarm.leave()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert f"{part} failed (RuntimeError: thrown by a test)." in caplog.text


@pytest.mark.long_but("node.model.stage_work.StageWork.last_stage")
@pytest.mark.parametrize("place", TASKS)
def test_an_exception_anywhere_is_told_and_the_swarm_goes_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        swarm = await _training(tmp_path)
        thrown = Thrown(place, 1, monkeypatch)
        await asyncio.sleep(60)
        assert thrown.count == 1
        for number in [number for number, task in swarm.tasks.items() if task.done()]:
            error = swarm.tasks.pop(number).exception()
            swarm.nodes.pop(number)
            assert isinstance(error, NolocoError), repr(error)  # a sentence and an exit code
            assert "start it again" in str(error)
        assert len(swarm.nodes) >= 3
        await everyone_goes_on(swarm)
        await swarm.leave()

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert "thrown by a test" in caplog.text
