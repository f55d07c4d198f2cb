"""The resources that this process may use: memory, disk, ports, optional packages; and amounts as people write them.

A process in a container sees the memory of the whole machine and is killed at the container's limit, so the limits
of its control groups are read, of both versions (Linux's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType

import psutil

from protocol.errors import MissingPackage, ResourceError
from protocol.files.installation import extra_line

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")
CONTAINER = "the container"
# what the program takes before it serves any stage, as each kind of limit counts: measured with torch 2.13
PROGRAM = {CONTAINER: 320 * 2**20, "ulimit -d": 480 * 2**20, "ulimit -v": 1300 * 2**20}
UNTOUCHED = 64 * 2**20  # of threads' stacks and heaps, which ulimit counts before they are written to


@dataclass(frozen=True)
class Room:
    """Bytes that may still be taken, and of what: `limit` bytes that `source` allows in all."""

    free: int
    limit: int
    source: str = ""  # "" is the machine itself

    def described(self) -> str:
        """The words that follow "1.0 GiB are free": of what."""
        return f" of the {size(self.limit)} that {self.source} allows" if self.source else ""


def host_room(most: int = 0) -> Room:
    """The memory that may still be taken; `most` is the volunteer's own limit for this node, 0 for none."""
    memory = psutil.virtual_memory()
    rooms = [Room(memory.available, memory.total), *_cgroup_rooms(), *_ulimit_rooms()]
    if most:
        rooms.append(Room(most - taken(), most, "--max-memory"))
    return min(rooms, key=lambda room: room.free)


def require_room_to_start() -> None:
    """Check for room before the program is loaded: under too low a limit it would fail halfway, or be killed.

    Raises `ResourceError`.
    """
    for room in (*_cgroup_rooms(), *_ulimit_rooms()):
        if room.limit < PROGRAM[room.source]:
            raise ResourceError(
                f"The program itself takes about {size(PROGRAM[room.source])}, and {room.source} allows "
                f"{size(room.limit)} in all. Raise that limit: a stage of the least preset needs some 300 MiB more."
            )


def taken() -> int:
    """Bytes of memory that this process and its child, p2pd, hold now."""
    process, total = psutil.Process(), 0
    for each in (process, *process.children()):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            total += each.memory_info().rss
    return total


def _ulimit_rooms() -> Iterator[Room]:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:  # not Linux
        return
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    for name, kind, field in (
        ("ulimit -v", resource.RLIMIT_AS, "VmSize"),
        ("ulimit -d", resource.RLIMIT_DATA, "VmData"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            counted = int(status[field].split()[0]) * 1024 - freed_memory()  # which stays in the count
            yield Room(limit - counted - UNTOUCHED, limit, name)


def _cgroup_rooms(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[Room]:
    """One for each limit of a control group that this process is in, from its own to the outermost."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_above(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_above(groups / "memory", path, *files)


def _limits_above(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[Room]:
    """Yield the limits along a path; in a container it may be that of the host, of which only the root is mounted."""
    for folder in {PurePosixPath("/"), PurePosixPath(path), *PurePosixPath(path).parents}:
        group = root / folder.relative_to("/")
        try:
            most = int((group / limit).read_text())  # "max" is none
            used = int((group / usage).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most < psutil.virtual_memory().total:  # version 1 writes no limit as nearly 2^63
            yield Room(most - used + int(counts.get(reclaimable, 0)), most, CONTAINER)


MIB = 2**20
# glibc's mallopt(3); other C libraries have none of it
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = 2**31 - 1
_LARGEST_IN_THE_HEAP = 32 * MIB  # as far as glibc lets it be set
_TAKEN_AT_A_TIME = 16 * MIB


def keep_freed_memory() -> bool:
    """Let memory of tensors and messages that was freed stay with the process; False where that cannot be set.

    glibc gives large blocks back to the system at once and takes them again a moment later, page by page, each page
    filled with zeros: a sixth of the time of an exchange. The process then stays as large as it was at its largest.
    """
    libc = _glibc()
    if libc is None:
        return False
    settings = {_MMAP_THRESHOLD: _LARGEST_IN_THE_HEAP, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _TAKEN_AT_A_TIME}
    taken = [libc.mallopt(setting, value) == 1 for setting, value in settings.items()]
    return all(taken)


def give_back_freed_memory() -> None:
    """Give freed memory back to the system, so that what the process holds is what it uses."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def freed_memory() -> int:
    """Bytes that were freed and may be used again without asking the system; 0 where glibc does not tell."""
    tell = getattr(_glibc(), "mallinfo2", None)  # since 2.33
    if tell is None:
        return 0
    tell.restype = _HeapFigures
    return int(tell().free)


class _HeapFigures(ctypes.Structure):
    """`struct mallinfo2`, mallinfo(3)."""

    _fields_ = (("beside", ctypes.c_size_t * 8), ("free", ctypes.c_size_t), ("at_the_top", ctypes.c_size_t))


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.malloc_trim else None
    except (OSError, AttributeError):
        return None


UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{letter}I": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)
}


LEAST_WITHOUT_UNIT = 2**20  # less of any memory or traffic nobody means


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "800 MB", "1.5g" or "4294967296". Raises `ValueError`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{text!r} is not an amount of memory: write it as 4GiB, 800MiB or 6GB")
    if unit == 1 and float(found[1]) < LEAST_WITHOUT_UNIT:
        raise ValueError(f"{text!r} would be {found[1]} bytes: write it with its unit, as {found[1]}GiB")
    return int(float(found[1]) * unit)


def parse_share(text: str) -> float | None:
    """0.5 of "50%"; None of what has no such sign. Raises `ValueError` for a bad share."""
    if not text.endswith("%"):
        return None
    share = float(text.removesuffix("%")) / 100 if re.fullmatch(r"[0-9.]{1,8}%", text) else 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is no share of the memory: write it as 50%")
    return share


def require_cache_size(text: str) -> None:
    """Check a --cache-size: "" for the default, an amount, or a share of the disk. Raises `ValueError`."""
    if text and parse_share(text) is None:
        parse_size(text)


def parse_rate(text: str) -> float:
    """Bytes per second of "20Mbit", "20 Mbit/s", "1.5Gbps" or "2.5MB/s". Raises `ValueError`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(bit(?:/s)?|bps|B/s)\s*", text, re.IGNORECASE)
    rate = float(found[1]) * UNITS[found[2].upper()] if found else 0.0
    if found is None or not rate:
        raise ValueError(f"{text!r} is not a bandwidth: write it as 20Mbit, 500kbit or 2.5MB/s")
    return rate if found[3].upper() == "B/S" else rate / 8


def size(count: int) -> str:
    """Bytes for people: "85.3 GiB", "5.6 MiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def tcp_port(addresses: list[str]) -> int:
    """The first TCP port in a list of multiaddresses; 0 when there is none."""
    for address in addresses:
        parts = address.split("/")
        if "tcp" in parts[:-1]:
            return int(parts[parts.index("tcp") + 1])
    return 0


def optional(module: str, extra: str) -> ModuleType:
    """Import a module that the extra `extra` brings. Raises `MissingPackage` when it is not there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise
        raise MissingPackage(
            f"This needs the package {package}, which is not installed: {extra_line(extra)}."
        ) from None
