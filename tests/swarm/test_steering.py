"""Limits that a volunteer changes while the node trains: they hold at once, and others are told."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.giving import limit_watch as keeping
from node.giving import sensors
from node.giving.limit_watch import LimitWatch, Senses
from node.giving.line import QUIET, Line
from node.giving.policy import VolunteerLimits
from node.process.daemon import Node
from node.process.steering import Steering
from protocol.errors import UserError
from tests.swarm.micro import FOREVER, events_of, everyone_goes_on, run_swarm, training, until

NOON = datetime(2026, 11, 24, 12, 0)


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("node.giving.limit_watch", "node.process.steering"):
        monkeypatch.setattr(f"{module}.local_time", lambda: NOON)


def steered(swarm: SimulatedSwarm, number: int) -> tuple[Node, LimitWatch, Steering]:
    """A node of the swarm with what `node.process.serving` gives a real one."""
    node, limits = swarm.nodes[number], VolunteerLimits()
    state = node.surroundings.state
    assert state is not None
    line = Line(state, node.transport, NOON, lambda: 0.0)
    senses = Senses(limits, torch.device("cpu"))
    keeper = LimitWatch(limits, senses, line, node.context.compute.duty, node.rest, node.surroundings.events)
    return node, keeper, Steering(node, keeper)


def said_of(swarm: SimulatedSwarm, node: Node) -> float | None:
    """The capacity that a peer of the other stage knows of it."""
    members = swarm.nodes[0].view.members(1, swarm.network.now())
    [capacity] = [m.announcement.capacity for m in members if m.peer == node.transport.peer_id]
    return capacity


def test_changed_limits_are_those_that_others_are_told_of(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(2, step=10, directory=tmp_path, inner__total_steps=FOREVER)
        node, _, steering = steered(swarm, 1)
        usual = node.context.throughput.capacity()
        assert usual is not None
        steering.change_limits({"gpu_percent": "25"})
        assert node.context.compute.duty.share == 0.25
        await asyncio.sleep(10)
        assert said_of(swarm, node) == pytest.approx(usual / 4, rel=0.3)
        steering.change_limits({"gpu_percent": "none", "max_upload": "1kbit"})
        assert node.context.compute.duty.share == 1.0
        await asyncio.sleep(10)
        slow = said_of(swarm, node)
        assert slow == pytest.approx(node.context.throughput.most, abs=1e-5)
        assert slow is not None
        assert slow < usual / 4
        assert steering.report()["limits"]["max-upload"]["limit"] == "1kbit"
        assert steering.report()["limits"]["gpu-percent"]["limit"] == ""
        [first, second] = events_of(swarm, "limits", node=1)
        assert first["limits"]["gpu_percent"] == "25"
        assert second["limits"]["max_upload"] == "1kbit"
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_hours_that_are_set_pause_it_at_once_and_lifted_ones_let_it_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = await training(2, directory=tmp_path, inner__total_steps=FOREVER)
        node, keeper, steering = steered(swarm, 1)
        limited: list[tuple[float, float]] = []
        node.transport.limit = lambda *rates: limited.append(rates)  # type: ignore[method-assign]
        steering.change_limits({"network_hours": "22-07", "max_download": "8kbit"})
        assert "outside of --network-hours 22-07" in node.rest.reason
        assert limited == [(0.0, 1e3)]  # what is in flight may end
        await until(lambda: bool(events_of(swarm, "paused", node=1)))
        await keeper.look(NOON)
        assert limited[-1] == (QUIET, 1e3)
        assert node.stage is None
        assert "--network-hours" in steering.report()["paused"]
        steering.change_limits({"network_hours": "none", "max_download": "none"})
        assert limited[-1] == (0.0, 0.0)
        await until(lambda: node.stage is not None)
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())


def test_what_cannot_be_had_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sensor(_: torch.device) -> Any:
        raise UserError("This machine does not tell how hot its cpu is.")

    monkeypatch.setattr(keeping, "thermometer", no_sensor)

    async def main() -> None:
        swarm = await training(1, directory=tmp_path, inner__total_steps=FOREVER)
        node, _, steering = steered(swarm, 1)
        before = node.member.config
        for wishes in ({"gpu_percent": "20", "max_temperature": "70"}, {"hours": "noon"}, {"port": 1}):
            with pytest.raises(UserError):
                steering.orders()["limits"]({"order": "limits", "limits": wishes})
        assert node.member.config is before
        assert node.context.compute.duty.share == 1.0
        assert not events_of(swarm, "limits", node=1)
        await swarm.leave()

    run_swarm(main())


def test_somebody_who_was_seen_does_not_hold_it_once_that_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "others", lambda _: sensors.ON_BATTERY)

    async def main() -> None:
        swarm = await training(1, directory=tmp_path, inner__total_steps=FOREVER)
        node, keeper, steering = steered(swarm, 1)
        steering.change_limits({"only_idle": True})
        assert not node.rest.reason  # what is read follows with the next look
        await keeper.look(NOON)
        assert node.rest.reason == "The machine runs on its battery."
        assert steering.report()["limits"]["only-idle"]["now"] == "The machine runs on its battery."
        steering.change_limits({"only_idle": False})
        assert not node.rest.reason
        await everyone_goes_on(swarm)
        await swarm.leave()

    run_swarm(main())
