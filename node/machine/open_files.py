"""The limit on open files of this process and of p2pd, which inherits it: each connection is one."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import ResourceError

LEAST = 128  # a node with a dozen neighbours; with 40 it fails in the middle of training
MOST = 65_536  # more is of no use to one process
Limits = tuple[int, int]  # the one that holds, and how far it may be raised


def take_open_files(
    limits: Callable[[], Limits] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    set_limits: Callable[[Limits], None] = lambda pair: resource.setrlimit(resource.RLIMIT_NOFILE, pair),
) -> None:
    """Raise the limit as far as this user may, and is of use. Raises `ResourceError` when that is too little."""
    soft, hard = limits()
    wanted = raised(soft, hard)
    if wanted != soft:
        with suppress(OSError, ValueError):  # a system may allow less than it says
            set_limits((wanted, hard))
            soft = wanted
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        raise ResourceError(
            f"This process may have {soft} files open, and connections to others are files: {LEAST} are the least, "
            f"some thousand are usual. Raise the limit (ulimit -n {MOST}; docker run --ulimit nofile={MOST})."
        )


def raised(soft: int, hard: int) -> int:
    """The limit to set: never below what holds already."""
    if soft == resource.RLIM_INFINITY or soft >= MOST:
        return soft
    return MOST if hard == resource.RLIM_INFINITY else max(soft, min(hard, MOST))
