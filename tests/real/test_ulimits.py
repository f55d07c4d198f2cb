"""Limits of a process, in processes that have them."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from node.machine.limits import host_room, taken
from protocol.records.identity import Identity

MIB, GIB = 2**20, 2**30


def test_the_least_of_all_limits_counts() -> None:
    most = taken() + 64 * MIB
    room = host_room(most)
    assert room.source == "--max-memory"
    assert abs(room.free - 64 * MIB) < 8 * MIB
    assert host_room().free > 64 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_ulimits_are_read() -> None:
    program = "from node.machine.limits import host_room; print(host_room().source, host_room().free)"
    for kind, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda kind=kind: resource.setrlimit(kind, (GIB, GIB)),
        )
        source, free = done.stdout.rsplit(maxsplit=1)
        assert source == name
        assert 0 < int(free) < GIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
@pytest.mark.parametrize(
    ("kind", "name"), [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")]
)
def test_a_limit_below_the_program_itself_is_told_before_it_is_loaded(kind: int, name: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "node.cli",
            "--join",
            f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",
        ],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(kind, (200 * MIB, 200 * MIB)),
    )
    assert done.returncode == 2
    assert f"{name} allows 200.0 MiB in all. Raise that limit" in done.stderr
    assert "Traceback" not in done.stderr
