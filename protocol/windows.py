"""Windows into the objects that live as long as a node: one line each, for a debugger and for what tests assert.

`<Bans [Offenders: 2 struck | Banned: 1 of late]>`. To look costs next to nothing and changes nothing; what is shown
are counts and the ends of peer ids, never a key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def window(look: Callable[[Any], str]) -> Callable[[Any], str]:
    """Makes a `__repr__` of what is to stand between the brackets; one that never raises."""

    @wraps(look)
    def shown(self: object) -> str:
        try:
            seen = look(self)
        except Exception as error:  # noqa: BLE001  it may be half built, or another thread changes it
            seen = f"cannot be seen: {type(error).__name__}"
        return f"<{type(self).__name__} [{seen}]>"

    return shown


def short(peer: str) -> str:
    """The end of a peer id, which is enough to tell peers apart; all of them begin alike."""
    return f"…{peer[-8:]}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with what it counts: "1 peer", "2 peers"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def amount(nbytes: float) -> str:
    """Bytes for people: "640 B", "1.5 KiB", "85.3 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
