"""Two machines with addresses of their own: network namespaces joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, NodeDaemon, SeedDaemon, wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces need root and the ip command (Debian: apt-get install iproute2)",
)

HOSTS = {"noloco-a": "10.77.0.1", "noloco-b": "10.77.0.2"}


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def on(host: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", host)


@pytest.fixture
def cable() -> Iterator[None]:
    for host in HOSTS:
        ip("netns", "delete", host, check=False)
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
    first, second = HOSTS
    ip("link", "add", "eth-a", "netns", first, "type", "veth", "peer", "name", "eth-b", "netns", second)
    for host, end in zip(HOSTS, ("eth-a", "eth-b"), strict=True):
        ip("-n", host, "address", "add", f"{HOSTS[host]}/24", "dev", end)
        ip("-n", host, "link", "set", end, "up")
    yield
    for host in HOSTS:
        ip("netns", "delete", host, check=False)


@pytest.fixture
def daemons(cable: None) -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.kill()


@pytest.mark.timeout(300)
def test_a_run_across_two_machines(tmp_path: Path, daemons: list[Daemon]) -> None:
    first, second = HOSTS
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny", host="0.0.0.0", prefix=on(first))
    daemons.append(seed)
    address = seed.join_address(f"/ip4/{HOSTS[first]}/")

    def start(name: str, host: str, stage: int, join: str) -> NodeDaemon:
        node = NodeDaemon(
            tmp_path / name, "--join", join, "--stage", str(stage), host="0.0.0.0", prefix=on(host)
        )
        daemons.append(node)
        return node

    # one replica of each stage on each machine: microbatches and rounds have to cross the cable
    nodes = [start(f"{host}-{stage}", host, stage, address) for host in HOSTS for stage in (0, 1)]
    for node in nodes:
        node.wait_for_step(60)
    for node in nodes:
        partners = wait_until(lambda node=node: {r["partner"] for r in node.events("round") if r["partner"]})
        assert partners, f"{node.state.name} never averaged with its replica on the other machine"

    # the seed peer dies; a newcomer on the second machine joins through a volunteer on the first
    seed.kill()
    member = next(a for a in nodes[0].events("addresses")[-1]["addresses"] if HOSTS[first] in a)
    newcomer = start("newcomer", second, 1, member)
    downloaded = newcomer.wait_for_event("downloaded")
    newcomer.wait_for_step(downloaded["step"] + 30)
    assert all(node.still_running() for node in nodes)
