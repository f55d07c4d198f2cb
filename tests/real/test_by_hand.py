"""A run as people start it, in separate terminals, and everything that may die on the way.

On two machines, network namespaces joined by a virtual cable; on one where nobody may make those.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import pytest

from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon, run_tool, wait_until

CABLE = {f"noloco-a{os.getpid()}": "10.77.0.1", f"noloco-b{os.getpid()}": "10.77.0.2"}


@dataclass
class Site:
    """The machines of a test, each with its address and the prefix that runs a command there."""

    directory: Path
    machines: list[tuple[str, tuple[str, ...]]]
    listen: str
    started: list[Daemon] = field(default_factory=list)

    def seed(self) -> tuple[SeedDaemon, str]:
        """The seed peer on the first machine, and its address."""
        address, prefix = self.machines[0]
        daemon = SeedDaemon(self.directory / "run", "--preset", "tiny", host=self.listen, prefix=prefix)
        self.started.append(daemon)
        return daemon, daemon.join_address(f"/ip4/{address}/")

    def node(self, name: str, machine: int, *arguments: str) -> NodeDaemon:
        _, prefix = self.machines[machine % len(self.machines)]
        daemon = NodeDaemon(self.directory / name, *arguments, host=self.listen, prefix=prefix)
        self.started.append(daemon)
        return daemon

    def address_of(self, node: NodeDaemon, machine: int) -> str:
        """Where others can reach the node."""
        address, _ = self.machines[machine % len(self.machines)]
        known: list[str] = node.wait_for_event("addresses")["addresses"]
        return next(text for text in known if text.startswith(f"/ip4/{address}/"))


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


def lay_cable() -> None:
    for host in CABLE:
        ip("netns", "delete", host, check=False)
        ip("netns", "add", host)
        ip("-n", host, "link", "set", "lo", "up")
    first, second = CABLE
    ip("link", "add", "eth-a", "netns", first, "type", "veth", "peer", "name", "eth-b", "netns", second)
    for host, end in zip(CABLE, ("eth-a", "eth-b"), strict=True):
        ip("-n", host, "address", "add", f"{CABLE[host]}/24", "dev", end)
        ip("-n", host, "link", "set", end, "up")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two machines; one where nobody may make network namespaces: those need root and the ip command (iproute2)."""
    two = os.geteuid() == 0 and shutil.which("ip") is not None
    if two:
        lay_cable()
        site = Site(tmp_path, [(a, ("ip", "netns", "exec", h)) for h, a in CABLE.items()], "0.0.0.0")
    else:
        site = Site(tmp_path, [("127.0.0.1", ())], "127.0.0.1")
    yield site
    for daemon in site.started:
        daemon.kill()
    for host in CABLE if two else ():
        ip("netns", "delete", host, check=False)


@pytest.mark.timeout(420)
def test_a_run_survives_its_members_its_seed_peer_and_a_power_cut(site: Site) -> None:
    seed, address = site.seed()
    nodes = [site.node(f"node{i}", i, "--join", address, "--stage", str(i // 2)) for i in range(4)]
    for node in nodes:
        node.wait_for_step(40)
    assert Counter(node.stage for node in nodes) == {0: 2, 1: 2}

    # kill -9 one node: the others go on and the loss keeps falling
    victim, other = [node for node in nodes if node.stage == 1]
    first_stage = [node for node in nodes if node.stage == 0]
    victim.kill()
    before = other.step
    losses_before = mean(other.losses()[-20:])
    other.wait_for_step(before + 150)
    assert mean(other.losses()[-20:]) < losses_before
    assert all(node.still_running() for node in [other, *first_stage])

    # kill -9 the seed peer: a newcomer on the other machine joins through a plain volunteer
    seed.kill()
    member = nodes.index(first_stage[0])
    through = site.address_of(first_stage[0], member)
    newcomer = site.node("newcomer", member + 1, "--join", through)
    downloaded = newcomer.wait_for_event("downloaded")
    assert downloaded["step"] > before
    assert newcomer.stage == 1
    newcomer.wait_for_step(downloaded["step"] + 60)
    paired = wait_until(lambda: [r for r in newcomer.events("round") if r["partner"]])
    assert paired, "the newcomer never averaged with anybody"
    assert mean(newcomer.losses()[-20:]) < losses_before + 0.3

    look_from_outside(site, through, members=4)

    # kill -9 everything; the state directories are enough to go on, without any address
    survivors = {name: node for name, node in named(site).items() if node not in (victim,)}
    for node in survivors.values():
        node.wait_for_event("checkpoint")
    steps = {name: node.events("checkpoint")[-1]["step"] for name, node in survivors.items()}
    peers = {name: node.address.rsplit("/", 1)[1] for name, node in survivors.items()}
    lives = {name: len(node.events("serving")) for name, node in survivors.items()}
    for node in survivors.values():
        node.kill()
    machines = {"newcomer": member + 1} | {f"node{i}": i for i in range(4)}
    again = {name: site.node(name, machines[name]) for name in survivors}
    for name, node in again.items():
        # from its own checkpoint, or from another's that was taken several rounds later
        assert wait_until(lambda: len(node.events("serving")) > lives[name]), node.output  # noqa: B023
        resumed = node.events("serving")[-1]["step"]
        assert resumed >= steps[name]
        node.wait_for_step(resumed + 30)
        assert node.address.rsplit("/", 1)[1] == peers[name]
    for node in again.values():
        assert node.leave() == 0, node.output


def named(site: Site) -> dict[str, NodeDaemon]:
    return {daemon.state.name: daemon for daemon in site.started if isinstance(daemon, NodeDaemon)}


def look_from_outside(site: Site, address: str, members: int) -> None:
    """Status, evaluation and export by a visitor on the last machine, through a plain volunteer."""
    _, prefix = site.machines[-1]
    status = run_tool("status", "--join", address, prefix=prefix)
    assert status.returncode == 0, status.stderr
    assert status.stdout.count("serving") == members, status.stdout
    scenario = site.directory / "links.json"
    links = run_tool("links", "--join", address, "--out", str(scenario), prefix=prefix)
    assert links.returncode == 0, links.stderr
    assert json.loads(scenario.read_text(encoding="utf-8"))["devices"] == members
    assert " 0 of " not in links.stdout, "the nodes have measured nothing"
    evaluation = run_tool("eval", "--join", address, "--sequences", "16", prefix=prefix)
    assert evaluation.returncode == 0, evaluation.stderr
    assert "nats per token" in evaluation.stdout
    export = run_tool("export", "--join", address, "--out", str(site.directory / "model"), prefix=prefix)
    assert export.returncode == 0, export.stderr
    assert (site.directory / "model" / "model.safetensors").exists()
