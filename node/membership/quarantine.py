"""Which peers broke the rules of averaging too often to be averaged with for a while. Pure; clock passed in:
one of elapsed seconds, which nobody sets.

Each replica keeps its own record and believes nobody else's: an accusation that travels is an attack by itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.transport.base import PeerId

OFFENCES = 3  # within the last MEETINGS with one peer; one alone may be an honest replica's bad round
MEETINGS = 5
QUARANTINE_SECONDS = 600.0  # doubling with each further one
MAX_QUARANTINE_SECONDS = 86_400.0
MAX_PEERS = 4_096  # remembered; the one longest unseen is forgotten first


@dataclass
class _Record:
    """Mutable state: whether each of the last meetings was an offence, and the quarantines so far."""

    meetings: deque[bool] = field(default_factory=lambda: deque(maxlen=MEETINGS))
    until: float = float("-inf")
    times: int = 0


class Quarantine:
    """Mutable state: a record of each peer that ever offended."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def note(self, peer: PeerId, is_offence: bool, now: float) -> bool:
        """A meeting with `peer` at `now` in seconds; whether a quarantine begins with it."""
        record = self._records.pop(peer, None)
        if record is None:
            if not is_offence:
                return False  # nothing is kept for the honest
            record = _Record()
            if len(self._records) >= MAX_PEERS:
                self._records.pop(next(iter(self._records)))
        self._records[peer] = record
        record.meetings.append(is_offence)
        if sum(record.meetings) < OFFENCES:
            return False
        record.until = now + min(MAX_QUARANTINE_SECONDS, QUARANTINE_SECONDS * 2.0**record.times)
        record.times += 1
        record.meetings.clear()  # it starts again afterwards
        return True

    def holds(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is to be left alone: no proposal to it, none taken from it."""
        record = self._records.get(peer)
        return record is not None and now < record.until
