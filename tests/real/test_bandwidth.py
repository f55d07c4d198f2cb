"""`--max-upload`: what the kernel counts on the interface of a node that trains stays below it.

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

from tests.real.daemons import NodeDaemon, SeedDaemon

INSIDE, OUTSIDE = "11.0.114.1", "11.0.114.2"
LIMIT = 20.0  # Mbit/s
MOST = 21.0  # of them, headers and all, and so for whatever else p2pd does
SECONDS = 60.0
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


@pytest.mark.timeout(800)
def test_a_node_with_a_limit_trains_and_moves_no_more(cable: Cable, tmp_path: Path) -> None:
    manifest = tmp_path / "shallow.toml"
    text = PRESET.read_text(encoding="utf-8")
    for name, value in SHALLOW.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    manifest.write_text(text, encoding="utf-8")
    outside = cable.inside_of(1)
    seed = SeedDaemon(tmp_path / "run", "--manifest", str(manifest), host=OUTSIDE, prefix=outside)
    address = seed.join_address(f"/ip4/{OUTSIDE}/")
    last = NodeDaemon(tmp_path / "last", "--join", address, "--stage", "1", host=OUTSIDE, prefix=outside)
    arguments = "--join", address, "--stage", "0"

    def first(*limits: str) -> NodeDaemon:
        node = NodeDaemon(tmp_path / "first", *arguments, *limits, host=INSIDE, prefix=cable.inside_of(0))
        node.wait_for_step(node.step + 8, patience=200)
        return node

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
