"""A network as that of a rented container: a private address behind a router that maps ports of its own to it.

Outside are public addresses, which peers dial on the word of others; nothing is sent to their owners.

inside 172.17.0.2 ── 172.17.0.1 router 11.0.113.1 ── 11.0.113.2 outside
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType

INSIDE, GATEWAY, ROUTER, OUTSIDE = "172.17.0.2", "172.17.0.1", "11.0.113.1", "11.0.113.2"


class MappedNetwork:
    """A context manager: three network namespaces, gone when it ends. `ports` maps the router's to the inside's."""

    def __init__(self, ports: dict[int, int]) -> None:
        self._ports = ports
        stem = f"noloco-{os.getpid()}"
        self._inside, self._router, self._outside = f"{stem}-in", f"{stem}-nat", f"{stem}-out"

    @property
    def inside(self) -> tuple[str, ...]:
        """What to put before a command so that it runs there, and sees the same mounts as here."""
        return ("nsenter", f"--net=/run/netns/{self._inside}")

    @property
    def router(self) -> tuple[str, ...]:
        """A machine with a public address of its own."""
        return ("nsenter", f"--net=/run/netns/{self._router}")

    @property
    def outside(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self._outside}")

    def __enter__(self) -> MappedNetwork:
        self._tear_down()
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._lay_cable(self._inside, INSIDE, GATEWAY, 16)
        self._lay_cable(self._outside, OUTSIDE, ROUTER, 24)
        _run("ip", "-n", self._inside, "route", "add", "default", "via", GATEWAY)
        _run("ip", "netns", "exec", self._router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        mapped = "".join(
            f"ip daddr {ROUTER} tcp dport {outer} dnat to {INSIDE}:{inner};\n"
            for outer, inner in self._ports.items()
        )
        rules = (
            "table ip nat {\n"
            f"chain prerouting {{ type nat hook prerouting priority -100;\n{mapped}}}\n"
            "chain postrouting { type nat hook postrouting priority 100;\n"
            "ip saddr 172.17.0.0/16 masquerade;\n}\n}\n"
        )
        _run("ip", "netns", "exec", self._router, "nft", "-f", "-", text=rules)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def lose_large_packets(self, most: int) -> None:
        """Carry packets of `most` bytes between inside and outside from now on, and lose larger ones in silence."""
        _run("ip", "-n", self._router, "link", "set", "dev", self._outside[-14:], "mtu", str(most))
        silence = (
            "table ip silent {\nchain output { type filter hook output priority 0;\n"
            "icmp type destination-unreachable icmp code 4 drop;\n}\n}\n"
        )
        _run("ip", "netns", "exec", self._router, "nft", "-f", "-", text=silence)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self._inside, self._router, self._outside)

    def _lay_cable(self, name: str, near: str, far: str, bits: int) -> None:
        _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", name[-14:])
        _run("ip", "-n", name, "link", "set", name[-14:], "netns", self._router)
        for namespace, link, address in ((name, "eth0", near), (self._router, name[-14:], far)):
            _run("ip", "-n", namespace, "address", "add", f"{address}/{bits}", "dev", link)
            _run("ip", "-n", namespace, "link", "set", link, "up")

    def _tear_down(self) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


def why_unavailable() -> str:
    """In words, empty when this machine can map ports between network namespaces."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "nft", "nsenter", "sysctl") if shutil.which(command) is None]
    return f"needs the commands ip, nft, nsenter and sysctl; no {missing[0]}" if missing else ""


def _run(*command: str, text: str | None = None) -> None:
    subprocess.run(command, input=text, check=True, capture_output=True, text=True)
