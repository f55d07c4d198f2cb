"""How much memory this node may still take: what is free, and what the volunteer, the container and ulimit allow.

A process in a container sees the memory of the whole machine and is killed at the container's limit, so the limits
of its control groups are read, of both versions (Linux's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from node.machine.heap import freed_memory
from node.machine.sizes import size
from protocol.errors import ResourceError

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
        """After "1.0 GiB are free": of what."""
        return f" of the {size(self.limit)} that {self.source} allows" if self.source else ""


def host_room(most: int = 0) -> Room:
    """Of the machine's memory; `most` is what the volunteer gives this node in all, 0 for no such limit."""
    memory = psutil.virtual_memory()
    rooms = [Room(memory.available, memory.total), *_cgroup_rooms(), *_ulimit_rooms()]
    if most:
        rooms.append(Room(most - taken(), most, "--max-memory"))
    return min(rooms, key=lambda room: room.free)


def require_room_to_start() -> None:
    """Before the program is loaded: under too low a limit it would end in the midst of that, or be killed.

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
    process = psutil.Process()
    total: int = process.memory_info().rss
    for child in process.children():
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:  # it has just ended
            continue
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
    """In a container the path may be that of the host, of which only the root is mounted."""
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
