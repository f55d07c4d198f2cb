"""Two nodes with one key, as when a state directory was copied: both are told, and the younger one leaves.

Peers take them for one that is now here, now there: a microbatch goes to either, an averaging is begun with one and
ended with the other.
"""

from __future__ import annotations

from node.membership.view import Member
from protocol.errors import NodeFailed


class Twins:
    """Watches records under this node's own key for another life of it, and remembers the one that is not this one's.

    A record that an earlier life of this node left runs out. One that is renewed has somebody who renews it.
    """

    def __init__(self) -> None:
        self._own: list[
            float
        ] = []  # since when this life was at its stages, by the wall clock, as it announced
        self._other: Member | None = None

    def announced(self, since: float) -> None:
        if since not in self._own:
            self._own.append(since)

    def renewed(self, seen: Member | None) -> bool:
        """Return whether another node renewed the record `seen`, under this node's key, since the last look."""
        if seen is None or not self._own or seen.announcement.since in self._own:
            return False
        before, self._other = self._other, seen
        return (
            before is not None
            and before.announcement.since == seen.announcement.since
            and seen.expires > before.expires
        )

    def is_older(self, other: Member) -> bool:
        """Return whether the other node was there before this one."""
        return other.announcement.since < self._own[0]


def leaves(other: Member) -> NodeFailed:
    """The error that the younger one's volunteer reads."""
    return NodeFailed(
        f"Another node runs with this node's key, at stage {other.announcement.stage}: its state directory was "
        "copied. This one is the younger and leaves. Give it a directory of its own with --state-dir, without the "
        "other's identity.key, or end the other one first."
    )


STAYS = (
    "A second node runs with this node's key: the state directory was copied. The younger of the two leaves; give it "
    "a directory of its own with --state-dir, without this one's identity.key."
)
