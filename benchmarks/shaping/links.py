"""Peers on links of a given bandwidth and latency, on one machine: for benchmarks and their tests.

Each peer gets a network namespace of its own. A virtual cable leads from it to a namespace in the middle, where
`link_relay.py` takes every frame through two links, up and down, and holds it back for the latency between them:

    peer 0 ──┐
    peer 1 ──┤ link_relay.py
    …        ┘

Needs root and the `ip` command, and no kernel module that Debian's cloud kernels lack: neither netem nor fq.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

_RELAY = Path(__file__).with_name("link_relay.py")
_CLEAN_UP_SECONDS = 10.0
_STEM = "noloco-"  # of the namespaces' names; then the process that made them, and which one it is


@dataclass(frozen=True)
class Shape:
    """One peer's link; latencies add up to `one_way` seconds from any peer to any other."""

    mbit: float  # per second, each way at the same time; infinite: as fast as the machine
    one_way: float  # seconds
    uplink: float | None = None  # megabits per second, where a peer sends with another speed than it receives

    @property
    def up(self) -> float:
        return self.mbit if self.uplink is None else self.uplink


class LinksUnavailable(Exception):
    """This machine cannot shape links; the text says why."""


class ShapedLinks:
    """A context manager: `peers` namespaces with one address each, gone when it ends.

    Raises `LinksUnavailable` on entering when the machine or the user's rights do not allow it; nothing is
    left behind then.
    """

    def __init__(self, peers: int, shape: Shape, packet_bytes: int = 1500) -> None:
        """Packets hold `packet_bytes` at most; the fewer they are, the less the links take of the processor."""
        self._peers = peers
        self._packet_bytes = packet_bytes
        self._shape = shape
        self._stem = f"{_STEM}{os.getpid()}"
        self._relay: subprocess.Popen[str] | None = None

    def address(self, peer: int) -> str:
        return f"10.78.{peer // 250}.{peer % 250 + 1}"

    def namespace(self, peer: int) -> str:
        return f"{self._stem}-{peer}"

    def prefix(self, peer: int) -> list[str]:
        """What to put before a command so that it runs in the namespace of `peer`."""
        return ["ip", "netns", "exec", self.namespace(peer)]

    def bytes_sent(self) -> int:
        """By all peers together since their links exist, headers included."""
        shown = subprocess.run(
            ["ip", "netns", "exec", self._middle, "cat"]
            + [f"/sys/class/net/wan{peer}/statistics/rx_bytes" for peer in range(self._peers)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return sum(map(int, shown.stdout.split()))

    def carried(self, peer: int) -> tuple[int, int]:
        """Bytes that a peer's link carried (up, down) since it exists, a segment's headers counted once."""
        counters = [f"/sys/class/net/wan{peer}/statistics/{way}_bytes" for way in ("rx", "tx")]
        command = ["ip", "netns", "exec", self._middle, "cat", *counters]
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        up, down = map(int, shown.stdout.split())
        return up, down

    def __enter__(self) -> ShapedLinks:
        reason = why_unavailable()
        if reason:
            raise LinksUnavailable(reason)
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self._tear_down()
            raise LinksUnavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    # --- building ---------------------------------------------------------------------------------

    @property
    def _middle(self) -> str:
        return f"{self._stem}-wan"

    def _build(self) -> None:
        _clear_away()
        _run("ip", "netns", "add", self._middle)
        for peer in range(self._peers):
            self._lay_cable(peer)
        self._start_relay()

    def _start_relay(self) -> None:
        command = ["ip", "netns", "exec", self._middle, sys.executable, "-S", str(_RELAY)]
        command += [f"wan{peer}" for peer in range(self._peers)]
        self._relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise LinksUnavailable("the relay did not start; its error is above")
        self.reshape(self._shape)

    def _lay_cable(self, peer: int) -> None:
        name, far = self.namespace(peer), f"wan{peer}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", far)
        _run("ip", "-n", name, "link", "set", far, "netns", self._middle)
        _run("ip", "-n", name, "address", "add", f"{self.address(peer)}/16", "dev", "eth0")
        for namespace, interface in ((name, "eth0"), (self._middle, far)):
            # without an IPv6 address there is no chatter about it, and the middle answers to nothing
            _run("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none")
            _run("ip", "-n", namespace, "link", "set", interface, "mtu", str(self._packet_bytes))
            _run("ip", "-n", namespace, "link", "set", interface, "up")

    def reshape(self, shape: Shape) -> None:
        """Other links from now on; what is under way arrives as if nothing had changed.

        Raises `LinksUnavailable` when the relay has ended.
        """
        assert self._relay is not None
        assert self._relay.stdin is not None
        try:
            self._relay.stdin.write(f"{shape.up} {shape.mbit} {shape.one_way}\n")
            self._relay.stdin.flush()
        except BrokenPipeError:
            raise LinksUnavailable("the relay ended; its error is above") from None

    def _tear_down(self) -> None:
        self._stop_relay()
        for name in [self.namespace(peer) for peer in range(self._peers)] + [self._middle]:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.terminate()
            with self._relay:  # closes its pipes
                self._relay.wait(_CLEAN_UP_SECONDS)
            self._relay = None


def why_unavailable() -> str:
    """In words, empty when links can be shaped here."""
    if not sys.platform.startswith("linux"):
        return "shaped links need Linux's network namespaces"
    if os.geteuid() != 0:
        return "shaped links need root, to make network namespaces"
    if shutil.which("ip") is None:
        return "shaped links need the command ip (Debian: apt-get install iproute2)"
    return ""


def _clear_away() -> None:
    """Remove the namespaces of processes that were killed."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines():
        named = re.match(rf"{_STEM}(\d+)-\w+", line)
        if named is not None and not psutil.pid_exists(int(named[1])):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", named[0])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
