"""Checks of this machine: memory, disk, GPU and driver, limits of the shell, the interface that is used and its MTU.

`noloco doctor` shows each, and a node warns at its start of those that are not well. What is judged comes as an
argument; `checks_here` looks.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from node.machine.limits import Room, host_room, size
from node.machine.open_files import MOST as MOST_FILES

LEAST_DISK = 2 << 30  # bytes: what checkpoints and prepared text of a small run take
LEAST_MEMORY = 1 << 30
LEAST_MTU = 1280  # what IPv6 asks of every link; tunnels below it lose large packets
USUAL_MTU = 1500
USUAL_FILES = 1_024  # what shells allow; of many neighbours, each has a connection or two
OUTSIDE = "192.0.2.1"  # nobody's (RFC 5737): a route to it is one to the internet
KERNELS_DRIVER = Path("/proc/driver/nvidia/version")
_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, in6.h


@dataclass(frozen=True)
class CheckResult:
    """One check: whether it is well (None: it cannot be told, or makes no difference), a sentence, a few words."""

    what: str
    is_well: bool | None
    told: str
    brief: str = ""


@dataclass(frozen=True)
class Interface:
    """The interface that the kernel chooses towards somebody: its name, the address that it has, its MTU in bytes."""

    name: str
    address: str
    mtu: int

    @property
    def is_private(self) -> bool:
        """Whether others can dial this address only through a router that forwards a port to it."""
        host = ipaddress.ip_address(self.address)
        return host.is_private and not host.is_loopback


def checks_here(directory: Path, towards: str = OUTSIDE) -> list[CheckResult]:
    """Check memory, the disk of `directory`, limits, and the interface `towards` a host. Takes milliseconds."""
    near = interface_towards(towards)
    return [
        memory(host_room()),
        disk(directory),
        ulimits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
        interface(near),
        *([mtu(near)] if near is not None else []),
    ]


def memory(room: Room) -> CheckResult:
    is_enough = room.free >= LEAST_MEMORY
    advice = "" if is_enough else " Close other programs, or raise the limit."
    free = size(max(0, room.free))
    return CheckResult(
        "memory", is_enough, f"{free} are free{room.described()}.{advice}", f"{free} of memory"
    )


def disk(directory: Path, free: int | None = None) -> CheckResult:
    """Judge the disk that holds `directory`, or will: its `free` bytes, and whether it can be written."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free if free is None else free
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        told = f"{place} cannot be written by this user. Choose another --state-dir, or change its owner."
        return CheckResult("disk", False, told)
    is_enough = free >= LEAST_DISK
    advice = "" if is_enough else " Free some space, or choose --state-dir on another disk."
    told = f"{size(free)} are free for the state directory.{advice}"
    return CheckResult("disk", is_enough, told, f"{size(free)} of disk")


def ulimits(files: int, file_size: int) -> CheckResult:
    """Judge the limits of the shell on open files, and on the bytes of one file; memory's are in `memory`."""
    unlimited = resource.RLIM_INFINITY
    if file_size != unlimited and file_size < LEAST_DISK:
        told = (
            f"A file may have {size(file_size)} (ulimit -f), and a checkpoint has more: ulimit -f unlimited."
        )
        return CheckResult("ulimits", False, told)
    allowed = "any number of files" if files == unlimited else f"{files:,} files"
    told = f"{allowed} may be open"
    if files == unlimited or files >= USUAL_FILES:
        return CheckResult("ulimits", True, f"{told}.", allowed)
    told += f", and each connection is one: enough for a small run. More: ulimit -n {MOST_FILES}."
    return CheckResult("ulimits", None, told, allowed)


def gpu(names: list[str], driver: str, torch: str, cuda: str | None) -> CheckResult:
    """Judge what torch of this version, made for this `cuda`, finds: `names` of GPUs, and the driver there is."""
    if names:
        return CheckResult("GPU", True, f"{', '.join(names)}{f', driver {driver}' if driver else ''}.")
    if not driver:
        return CheckResult("GPU", None, "No NVIDIA GPU: the node would train on the processor.")
    why = (
        f"is made for CUDA {cuda}: update the driver"
        if cuda
        else "is built for the CPU: install one with CUDA"
    )
    return CheckResult("GPU", False, f"There is a GPU (driver {driver}), but torch {torch} {why}.")


def kernels_driver(file: Path = KERNELS_DRIVER) -> str:
    """The version of the NVIDIA driver that the kernel has loaded; empty where it tells none."""
    with suppress(OSError):
        found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", file.read_text())
        return found[0] if found else ""
    return ""


def interface(near: Interface | None) -> CheckResult:
    if near is None:
        told = "No route leads there. Is this machine connected? (Linux: ip route)"
        return CheckResult("interface", False, told)
    told = f"{near.name}, {near.address}"
    if near.is_private:
        told += ": a private address, which others can dial only by a port that a router forwards to it"
    return CheckResult("interface", True, f"{told}.", f"{near.name} with {near.address}")


def mtu(near: Interface) -> CheckResult:
    brief, set_it = f"MTU {near.mtu}", f"ip link set dev {near.name} mtu"
    if near.mtu >= USUAL_MTU:
        return CheckResult("MTU", True, f"{near.mtu} bytes on {near.name}.", brief)
    if near.mtu >= LEAST_MTU:
        told = (
            f"{near.mtu} bytes on {near.name}, where {USUAL_MTU} are usual. It works, and a tunnel or DSL needs it; "
            f"where there is neither: {set_it} {USUAL_MTU}"
        )
        return CheckResult("MTU", None, told, brief)
    told = f"{near.mtu} bytes on {near.name}: large packets may be lost. Raise it: {set_it} {LEAST_MTU}"
    return CheckResult("MTU", False, told)


def interface_towards(host: str) -> Interface | None:
    """The interface towards `host`, an IP address; None when no route leads there. Nothing is sent."""
    six = ":" in host
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
        name = next(
            (
                name
                for name, near in psutil.net_if_addrs().items()
                if any(each.address == address for each in near)
            ),
            "",
        )
        try:  # of the route, which may have less than the interface
            level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
            mtu = probe.getsockopt(level, option)
        except OSError:  # not Linux
            mtu = psutil.net_if_stats()[name].mtu if name else USUAL_MTU
    return Interface(name or "an interface", address, mtu)
