"""`noloco doctor` in networks where one thing is wrong each: it names that, and says what to do.

The members are real peers outside, of a run in which nobody trains.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real.daemons import Daemon, end, run_tool
from tests.real.mapped_network import INSIDE, OUTSIDE, ROUTER, MappedNetwork, why_unavailable

PORT = 31337
MEMBERS = 4

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable()),
    pytest.mark.timeout(240),
]


class Way:
    """Members outside, and a machine to look from."""

    def __init__(self, network: MappedNetwork, join: list[str]) -> None:
        self.network = network
        self.join = join

    def doctor(
        self, *arguments: str, prefix: tuple[str, ...], module: str = "bootstrap.tools_cli"
    ) -> dict[str, str]:
        """Its lines by what they are about, with their marks; and under "" all that it printed."""
        joins = [part for address in self.join for part in ("--join", address)]
        done = run_tool("doctor", *joins, "--port", str(PORT), *arguments, prefix=prefix, module=module)
        assert "Traceback" not in done.stderr, done.stderr
        print(done.stdout)
        lines = re.findall(r"^(ok|NO|--) +(\S+) +(.*)$", done.stdout, re.MULTILINE)
        bad = {what for mark, what, _ in lines if mark == "NO"}
        assert done.returncode == (1 if bad else 0), done.stdout + done.stderr
        assert set(re.findall(r"^Not well: (\S+)\.$", done.stdout, re.MULTILINE)) == bad
        return {what: f"{mark} {told}" for mark, what, told in lines} | {"": done.stdout}


@contextmanager
def way(tmp_path: Path, mapped: bool) -> Iterator[Way]:
    with MappedNetwork({PORT: PORT} if mapped else {}) as network:
        program = Path(__file__).with_name("small_members.py")
        command = [
            sys.executable,
            str(program),
            OUTSIDE,
            str(MEMBERS),
        ]
        members = Daemon(command, tmp_path / "members.log", network.outside)
        try:
            found = members.wait_for(rf"(?m)(^/ip4/\S+\n){{{MEMBERS}}}")
            yield Way(network, found.group(0).split())
        finally:
            end(members.process.pid)
            members.process.wait(10)


def in_namespace(prefix: tuple[str, ...], *command: str, text: str | None = None) -> None:
    subprocess.run([*prefix, *command], input=text, check=True, capture_output=True, text=True)


def test_an_open_port_is_well(tmp_path: Path) -> None:
    with way(tmp_path, mapped=True) as here:
        told = here.doctor(prefix=here.network.inside)
        assert told["interface"].startswith(f"ok eth0, {INSIDE}: a private address")
        assert told["MTU"] == "ok 1500 bytes on eth0."
        assert told["packets"] == "ok Large packets arrive, too."
        assert re.match(rf"ok [+-]0\.\d\d s beside {MEMBERS} members'", told["clock"])
        at = f"/ip4/{ROUTER}/tcp/{PORT}"
        assert told["port"] == f"ok {MEMBERS} of {MEMBERS} peers dialled this machine directly, at {at}."
        assert re.match(r"ok [\d.]+ Mbit/s or more", told["uplink"])


def test_a_port_that_the_firewall_closes(tmp_path: Path) -> None:
    with way(tmp_path, mapped=False) as here:
        hook = "type filter hook input priority 0;"
        closed = f"table ip fw {{\nchain input {{ {hook}\ntcp dport {PORT} ct state new drop;\n}}\n}}\n"
        in_namespace(here.network.router, "nft", "-f", "-", text=closed)
        told = here.doctor(prefix=here.network.router)
        assert told["interface"].endswith(f", {ROUTER}.")  # a public address
        assert told["port"].startswith(f"-- None of {MEMBERS} peers could dial this machine")
        assert f"Open TCP port {PORT} in this machine's firewall (ufw allow {PORT}/tcp)" in told["port"]
        assert told["uplink"].startswith("ok")


def test_behind_a_router_that_forwards_nothing(tmp_path: Path) -> None:
    with way(tmp_path, mapped=False) as here:
        told = here.doctor(prefix=here.network.inside)
        assert told["port"].startswith(f"-- None of {MEMBERS} peers could dial this machine.")
        assert f"Forward TCP port {PORT} of the router to {INSIDE}, this machine" in told["port"]


def test_a_clock_that_is_ten_seconds_ahead(tmp_path: Path) -> None:
    with way(tmp_path, mapped=True) as here:
        told = here.doctor(prefix=here.network.inside, module="tests.real.wrong_clock")
        assert re.match(r"NO This machine's clock is (9\.9|10\.\d) s ahead of the swarm's", told["clock"])
        assert "timedatectl set-ntp true" in told["clock"]
        assert "port" not in told  # the clock is the hop that fails


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    own_mounts = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
    filled = f'mount -t tmpfs -o size=1m none {full} && head -c 1048576 /dev/zero > {full}/all; exec "$@"'
    with way(tmp_path, mapped=True) as here:
        prefix = (*here.network.inside, *own_mounts, filled, "sh")
        told = here.doctor("--state-dir", str(full / "state"), prefix=prefix)
        assert told["disk"] == (
            "NO 0.0 MiB are free for the state directory. Free some space, or choose --state-dir on another disk."
        )
        assert told["port"].startswith("ok")  # all else is looked at, too
        everything = here.doctor("--state-dir", str(full), prefix=(*prefix, "env", f"TMPDIR={full}"))
        assert everything["disk"].startswith("NO ")


def test_an_interface_with_a_small_mtu(tmp_path: Path) -> None:
    with way(tmp_path, mapped=True) as here:
        in_namespace(here.network.inside, "ip", "link", "set", "dev", "eth0", "mtu", "1280")
        told = here.doctor(prefix=here.network.inside)
        assert told["MTU"].startswith("-- 1280 bytes on eth0, where 1500 are usual.")
        assert told["MTU"].endswith("ip link set dev eth0 mtu 1500")
        assert told["packets"].startswith("ok")
        assert told["uplink"].startswith("ok")


def test_a_way_that_loses_large_packets_without_a_word(tmp_path: Path) -> None:
    with way(tmp_path, mapped=True) as here:
        here.network.lose_large_packets(1280)
        told = here.doctor(prefix=here.network.inside)
        assert told["MTU"].startswith("ok 1500")  # of the interface, which knows nothing of it
        assert told["packets"].startswith("NO Packets of 1280 bytes arrive, larger ones (1360) are lost")
        assert "ip link set dev eth0 mtu 1280" in told["packets"]
        in_namespace(here.network.inside, "ip", "link", "set", "dev", "eth0", "mtu", "1280")
        mended = here.doctor(prefix=here.network.inside)  # by what it said
        assert mended["packets"].startswith("ok")
        assert mended["port"].startswith("ok")
        assert mended["uplink"].startswith("ok")
