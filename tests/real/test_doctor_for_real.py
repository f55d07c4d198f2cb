"""`noloco doctor --join` against peers that run and addresses where something is wrong, and `noloco contributors`."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from protocol.records.identity import Identity
from tests.real.daemons import NodeDaemon, SeedDaemon, run_tool


@pytest.mark.timeout(240)
def test_the_way_to_a_run_is_checked_step_by_step_and_what_was_given_is_shown(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    by_name = address.replace("/ip4/127.0.0.1/", "/dns4/localhost/")
    nodes = [NodeDaemon(tmp_path / f"node-{n}", "--join", address, "--stage", str(n)) for n in range(2)]
    nodes[1].wait_for_step(3)
    done = run_tool("doctor", "--join", by_name, "--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in (
        "memory",
        "disk",
        "ulimits",
        "interface",
        "MTU",
        "GPU",
        "TCP",
        "packets",
        "libp2p",
        "greeting",
        "clock",
        "port",
        "uplink",
    ):
        assert re.search(rf"^(ok|--) +{what}", done.stdout, re.MULTILINE), done.stdout
    assert re.search(
        r"port +3 of 3 peers dialled this machine directly, at /ip4/127.0.0.1/tcp/\d+", done.stdout
    )
    assert re.search(r"uplink +[\d.]+ Mbit/s", done.stdout)
    assert "run 'tiny'" in done.stdout
    could = run_tool("manifest", "check", "--join", address, "--json", "--threads", "1")
    assert could.returncode == 0, could.stderr
    machine = json.loads(could.stdout)
    assert machine["upload_is_measured"]
    assert [(stage["replicas"], stage["fits"]) for stage in machine["stages"]] == [(1, "whole"), (1, "whole")]
    assert all(
        stage["computes"] > 0 and stage["sent"] > 0 and stage["pace"] > 0 for stage in machine["stages"]
    )
    words = " ".join(run_tool("manifest", "check", "--join", address, "--uplink", "8Mbit").stdout.split())
    assert "8.0 Mbit/s up (as you say), 8.0 Mbit/s down (taken to be the same" in words
    given = run_tool("contributors", "--join", address, "--json")
    assert given.returncode == 0, given.stderr
    found = json.loads(given.stdout)
    assert len(found) == 2
    assert all(one["tokens"] > 0 and one["signers"] == 1 for one in found)
    assert "tokens" in run_tool("contributors", "--join", address).stdout
    for node in nodes:
        assert node.step
        assert not node.events("resend")  # nobody took the visitor for a node
        assert node.leave() == 0, node.output


def test_the_hop_that_fails_has_a_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = server.getsockname()[1]
        peer = Identity.generate().peer_id
        done = run_tool("doctor", "--join", "/ip4/127.0.0.1/tcp/1/p2p/nobody", "--port", "0")
        assert done.returncode == 1
        assert "NO  address" in done.stdout
        done = run_tool("doctor", "--join", f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer}", "--port", "0")
        assert done.returncode == 1
        assert re.search(r"NO  TCP .*Does the peer run", done.stdout), done.stdout
        done = run_tool(
            "doctor",
            "--join",
            f"/ip4/127.0.0.1/tcp/{silent}/p2p/{peer}",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        )
        assert done.returncode == 1
        assert re.search(r"ok  TCP", done.stdout)
        assert re.search(r"NO  libp2p", done.stdout), done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
