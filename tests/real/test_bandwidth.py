"""`--max-upload`: what the kernel counts on the interface of a node that trains stays below it, also a changed one.

inside 11.0.114.1 ── 11.0.114.2 outside
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import patience
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool

INSIDE, OUTSIDE = "11.0.114.1", "11.0.114.2"
LIMIT = 20.0  # Mbit/s
MOST = 21.0  # of them, headers and all, and so for whatever else p2pd does
SECONDS = 60.0
LESS, MOST_OF_LESS = 5.0, 5.25  # Mbit/s
SOON = 3.0  # seconds from the order to change it
QUIET = 0.3  # Mbit/s: streams get 0.256, and what else p2pd does is taken off it
PRESET = Path(__file__).parent.parent.parent / "protocol" / "presets" / "tiny.toml"
# shallow, and with much text at once: a token is little to compute and 512 bytes to send
SHALLOW = {
    "layers": 2,
    "hidden_size": 128,
    "intermediate_size": 32,
    "sequence_tokens": 256,
    "sequences": 8,
    "microbatches": 4,
    "learning_rate": 3e-4,
}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))), reason="needs root, ip and nsenter"
)


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Cable:
    """Two network namespaces and a cable between them, which sends each packet by itself."""

    def __init__(self) -> None:
        self.names = [f"noloco-{os.getpid()}-{end}" for end in ("a", "b")]
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        inside, outside = self.names
        ip("-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", outside)
        for name, address in zip(self.names, (INSIDE, OUTSIDE), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1", "up")

    def inside_of(self, end: int) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self.names[end]}")

    def moved(self, way: str) -> int:
        """Bytes that the interface inside has sent ("tx") or received ("rx")."""
        [link] = json.loads(ip("-n", self.names[0], "-s", "-j", "link", "show", "eth0"))
        return int(link["stats64"][way]["bytes"])

    def cut(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.cut()


def rate(cable: Cable, seconds: float, way: str = "tx") -> float:
    """Mbit/s over so long."""
    began, before = time.monotonic(), cable.moved(way)
    time.sleep(seconds)
    return 8e-6 * (cable.moved(way) - before) / (time.monotonic() - began)


class Swarm:
    """A seed peer and the last stage outside; whoever is the first stage inside sends much over the cable."""

    def __init__(self, cable: Cable, directory: Path) -> None:
        manifest = directory / "shallow.toml"
        text = PRESET.read_text(encoding="utf-8")
        for name, value in SHALLOW.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        manifest.write_text(text, encoding="utf-8")
        outside = cable.inside_of(1)
        seed = SeedDaemon(directory / "run", "--manifest", str(manifest), host=OUTSIDE, prefix=outside)
        self.address = seed.join_address(f"/ip4/{OUTSIDE}/")
        self.last = NodeDaemon(
            directory / "last", "--join", self.address, "--stage", "1", host=OUTSIDE, prefix=outside
        )
        self._inside, self._directory = cable.inside_of(0), directory

    def first(self, *limits: str) -> NodeDaemon:
        """A node of the first stage with these limits, once it trains."""
        arguments = "--join", self.address, "--stage", "0", *limits
        node = NodeDaemon(self._directory / "first", *arguments, host=INSIDE, prefix=self._inside)
        node.wait_for_step(node.step + 8, patience=200)
        return node


@pytest.mark.timeout(800)
def test_a_node_with_a_limit_trains_and_moves_no_more(cable: Cable, tmp_path: Path) -> None:
    swarm = Swarm(cable, tmp_path)
    first, last = swarm.first, swarm.last
    free = first()
    unlimited = rate(cable, 10.0)
    assert unlimited > 1.3 * LIMIT, f"{unlimited:.1f} Mbit/s need no limit"
    assert free.leave() == 0, free.output

    for flag, way in (("--max-upload", "tx"), ("--max-download", "rx")):
        limited = first(flag, f"{LIMIT:g}Mbit")
        step = limited.step
        measured = rate(cable, SECONDS, way)
        steps = limited.step - step
        print(f"{flag} {LIMIT:g}Mbit: {measured:.2f} Mbit/s, {steps} steps; {unlimited:.1f} Mbit/s without")
        assert measured <= MOST
        assert measured > 0.6 * LIMIT
        assert steps >= 10
        assert not limited.events("resend")
        assert limited.leave() == 0, limited.output
    assert last.leave() == 0, last.output


def limit(node: NodeDaemon, *arguments: str) -> str:
    """`noloco node limits …` for it; what the command printed."""
    done = run_tool("node", "limits", "--state-dir", str(node.state), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def each_second(cable: Cable, seconds: int) -> list[float]:
    """Mbit/s sent, second by second."""
    return [rate(cable, 1.0) for _ in range(seconds)]


@pytest.mark.timeout(800)
def test_a_limit_that_is_changed_while_it_trains_holds_within_three_seconds(
    cable: Cable, tmp_path: Path
) -> None:
    swarm = Swarm(cable, tmp_path)
    node = swarm.first("--max-upload", f"{LIMIT:g}Mbit")
    before = rate(cable, 10.0)
    assert 0.6 * LIMIT < before <= MOST
    step = node.step

    said = limit(node, "--max-upload", f"{LESS:g}Mbit")
    changed = node.wait_for_event("limits")["time"]
    late = time.time() - changed  # the command has to end, too
    seconds = each_second(cable, 40)
    assert 'max_upload = "5Mbit"' in said
    settled = 0
    for number, measured in enumerate(seconds):
        if measured > 1.1 * LESS:  # a burst at the end of a second
            settled = number + 1
    soon = [measured for number, measured in enumerate(seconds) if late + number >= SOON]
    mean = sum(soon) / len(soon)
    print(
        f"{before:.2f} Mbit/s, then from {late:.2f} s after the change on: {[round(s, 2) for s in seconds]}"
    )
    print(
        f"never more than {1.1 * LESS} from {late + settled:.2f} s on; {mean:.2f} on average from {SOON:g} s on"
    )
    assert late + settled <= SOON
    assert 0.6 * LESS < mean <= MOST_OF_LESS
    assert node.step > step
    assert re.search(r"max-upload +5Mbit +[345]\.\d\d Mbit/s at present", limit(node))

    limit(node, "--max-upload", "none")
    time.sleep(SOON)
    lifted = rate(cable, 10.0)
    print(f"{lifted:.1f} Mbit/s once it is lifted")
    assert lifted > 1.3 * LIMIT

    hour = (time.localtime().tm_hour + 6) % 24
    limit(node, "--network-hours", f"{hour}-{hour + 1}")
    node.wait_for_event("paused")
    time.sleep(2 * 5.0 + SOON)  # it looks every five seconds, and is quiet from then on
    quiet = [rate(cable, 30.0, way) for way in ("tx", "rx")]
    print(f"outside of its network hours: {quiet[0]:.3f} Mbit/s up, {quiet[1]:.3f} down")
    assert max(quiet) <= QUIET
    assert "--network-hours" in run_tool("node", "status", "--state-dir", str(node.state)).stdout
    step = node.step
    limit(node, "--network-hours", "none")
    node.wait_for_step(step + 3, patience(120))
    assert node.leave() == 0, node.output
    assert swarm.last.leave() == 0, swarm.last.output
