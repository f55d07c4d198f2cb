"""The page and the guest of `noloco swarm`: what it prints is typed as it stands, and all ends with it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.records.identity import Identity
from tests.patience import patience
from tests.real.daemons import Daemon, wait_until
from tests.real.local_swarm import swarm_command

SEEN_SECONDS = 5.0  # from a member's record to its row


def started(directory: Path, *arguments: str) -> Daemon:
    command = swarm_command(directory, "--replicas", "1", "--validation-sequences", "8", *arguments)
    return Daemon(command, directory / "output.log")


def page_of(swarm: Daemon) -> str:
    """Its address, which is in the first lines."""
    address = swarm.wait_for(r"See it at (http://127\.0\.0\.1:\d+/)\n").group(1)
    assert address in "".join(swarm.output.splitlines(keepends=True)[:4])
    return address


def rows_of(address: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{address}state", timeout=patience(60)) as answer:
        rows: list[dict[str, Any]] = json.load(answer)["rows"]
    return rows


def guest_of(swarm: Daemon, directory: Path) -> Daemon:
    """A node started by the line that the swarm printed, in a terminal of its own."""
    line = swarm.wait_for(r"(noloco join /ip4/127\.0\.0\.1/\S+)\n").group(1)
    _, _, *arguments = shlex.split(line)
    state = directory / "guest"
    return Daemon(
        [sys.executable, "-m", "node.cli", *arguments, f"--state-dir={state}"], directory / "guest.log"
    )


@pytest.mark.timeout(patience(500))
def test_a_guest_is_on_the_page_within_five_seconds_and_the_swarm_ends_without_it(tmp_path: Path) -> None:
    swarm = started(tmp_path, "--steps", "100000", "--minutes", "1")
    address = page_of(swarm)
    rows_of(address)  # the page is not there yet: a browser waits
    assert wait_until(lambda: [row["state"] for row in rows_of(address)] == ["serving"] * 2), swarm.output
    guest = guest_of(swarm, tmp_path)
    assert wait_until(lambda: "Getting the state" in guest.output, while_true=guest.still_running), (
        guest.output
    )
    member_since = time.monotonic()  # its record was put just before that line
    peer = Identity.load_or_create(tmp_path / "guest" / "identity.key").peer_id
    assert wait_until(lambda: any(row["id"] == peer for row in rows_of(address)), patience(30))
    took = time.monotonic() - member_since
    print(f"on the page {took:.1f} s after its record")
    assert took <= patience(SEEN_SECONDS), guest.output
    assert wait_until(
        lambda: any(
            row["id"] == peer and row["state"] == "serving" and row["step"] for row in rows_of(address)
        )
    ), guest.output
    swarm.wait_for("3/3 alive")
    assert swarm.process.wait(patience(300)) == 0, swarm.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"]
    assert sorted(summary["nodes"]) == sorted([peer, "s0r0", "s1r0"])
    assert guest.still_running()
    assert guest.leave() == 0, guest.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.timeout(300)
def test_the_page_ends_with_the_swarm(number: signal.Signals, tmp_path: Path) -> None:
    swarm = started(tmp_path)
    address = page_of(swarm)
    rows_of(address)
    children = psutil.Process(swarm.process.pid).children(recursive=True)
    swarm.signal(number)
    swarm.process.wait(100)
    _, alive = psutil.wait_procs(children, timeout=patience(90))
    assert not alive, [child.cmdline() for child in alive]
    port = int(address.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    if number == signal.SIGINT:
        assert "Traceback" not in swarm.output + (tmp_path / "run" / "dashboard.log").read_text()


@pytest.mark.timeout(300)
def test_the_page_ends_with_a_swarm_that_fails_and_none_is_none(tmp_path: Path) -> None:
    typo = started(tmp_path, "--data", str(tmp_path / "typo.txt"))
    address = page_of(typo)
    assert typo.process.wait(patience(120)) == 2, typo.output
    with pytest.raises(OSError, match="refused"):
        rows_of(address)
    none = tmp_path / "none"
    none.mkdir()
    command = swarm_command(none, "--dashboard", "none", "--data", str(tmp_path / "typo.txt"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(120))
    assert not re.search("http|See it", done.stdout)


@pytest.mark.timeout(120)
def test_a_place_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        swarm = started(tmp_path, "--dashboard", f"127.0.0.1:{taken.getsockname()[1]}")
        assert swarm.process.wait(patience(60)) == 2
    assert "another --dashboard" in swarm.output
    assert not (tmp_path / "run").exists()
