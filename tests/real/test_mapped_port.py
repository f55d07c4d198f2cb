"""Nodes behind a mapped port tell others the outside address, never a container's own one, and are reached there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, run_tool
from tests.real.mapped_network import OUTSIDE, ROUTER, MappedNetwork, why_unavailable

RENTED, SAME = 41337, 31338  # the router's ports: another than the node's, and the same


@pytest.fixture
def started() -> Iterator[list[Daemon]]:
    daemons: list[Daemon] = []
    yield daemons
    for daemon in daemons:
        daemon.kill()


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.timeout(240)
def test_status_shows_where_rented_nodes_are_reached(tmp_path: Path, started: list[Daemon]) -> None:
    with MappedNetwork({RENTED: 31337, SAME: SAME}) as network:
        seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", host="0.0.0.0", prefix=network.outside)
        started.append(seed)
        join = seed.join_address(f"/ip4/{OUTSIDE}/")
        # one is told by its platform, the other learns it from the seed peer
        platform = ("env", f"RUNPOD_PUBLIC_IP={ROUTER}", f"RUNPOD_TCP_PORT_31337={RENTED}")
        told = NodeDaemon(
            tmp_path / "told", "--join", join, "--stage", "0", "--port", "31337",
            host="0.0.0.0", prefix=(*network.inside, *platform),
        )  # fmt: skip
        learns = NodeDaemon(
            tmp_path / "learns", "--join", join, "--stage", "1", "--port", str(SAME),
            host="0.0.0.0", prefix=network.inside,
        )  # fmt: skip
        started += [told, learns]
        told.wait_for_step(5)
        assert told.address.startswith(f"/ip4/{ROUTER}/tcp/{RENTED}/p2p/")
        assert learns.address.startswith(f"/ip4/{ROUTER}/tcp/{SAME}/p2p/")
        learns.wait_for(f"Announcing /ip4/{ROUTER}/tcp/{SAME}")

        through = told.address  # from outside, through the mapped port
        status = run_tool("status", "--join", through, prefix=network.outside)
        assert status.returncode == 0, status.stderr
        assert {told.address, learns.address} <= set(re.findall(r"/ip4/\S+", status.stdout)), status.stdout
        assert "172.17" not in status.stdout
        guest = NodeDaemon(
            tmp_path / "guest",
            "--join",
            learns.address,
            "--stage",
            "1",
            host="0.0.0.0",
            prefix=network.outside,
        )
        started.append(guest)
        guest.wait_for_event("downloaded")
