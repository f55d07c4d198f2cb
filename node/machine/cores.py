"""The number of threads worth having here: a container sees all cores of its machine, and is stopped at its quota.

The quotas of control groups of both versions are read (Linux's admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst).
With more threads than the quota has cores, all of them stand still for the rest of each period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath

from node.machine.limits import CGROUPS, MEMBERSHIP

# By which those who start threads for themselves are told how many: OpenMP in torch, and Go in p2pd
THREADS = ("OMP_NUM_THREADS", "GOMAXPROCS")


def cores() -> int:
    """Cores that this process may use all the time, at least one: by its affinity and its quotas."""
    return whole_cores(_may_run_on(), quotas())


def keep_within_quota(environment: MutableMapping[str, str]) -> None:
    """Have torch, if it is not yet imported, and p2pd start no more threads than `cores()`, unless told otherwise.

    Without a quota nothing is set: by the affinity both go themselves.
    """
    if (allowed := cores()) < _may_run_on():
        for name in THREADS:
            environment.setdefault(name, str(allowed))


def _may_run_on() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def whole_cores(may_run_on: int, allowed: Iterator[float]) -> int:
    return max(1, int(min([float(may_run_on), *allowed])))


def quotas(groups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[float]:
    """Quotas in cores, of each control group that has one and holds this process, from its own to the outermost."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _above(groups, path, ("cpu.max",))
        elif "cpu" in controllers.split(","):
            for mounted in ("cpu", controllers):  # by the one name, or by that of all in the hierarchy
                yield from _above(groups / mounted, path, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _above(root: Path, path: str, files: tuple[str, ...]) -> Iterator[float]:
    """Yield the quotas along a path; in a container it may be that of the host, of which only the root is mounted."""
    for folder in {PurePosixPath("/"), PurePosixPath(path), *PurePosixPath(path).parents}:
        group = root / folder.relative_to("/")
        try:
            words = " ".join((group / file).read_text(encoding="utf-8") for file in files).split()
            quota, period = map(int, words)  # "max", or -1 in version 1, is none
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            yield quota / period
