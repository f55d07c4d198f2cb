"""The verdict of `bootstrap.inspect.verdict` on what a board has seen, the worst first, and as lines of a log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.remembering import Memory
from bootstrap.inspect.seen import Finding, Severity
from bootstrap.inspect.verdict import verdict
from protocol.records.announcement import Announcement
from protocol.version import own_version

logger = logging.getLogger("noloco")


class Wording:
    """Puts the sightings of a board into findings. Mutable state: what it remembers of earlier sightings."""

    def __init__(
        self,
        stages: int,
        version: str | None = None,
        foreign: Callable[[float], Sequence[Announcement]] = lambda now: (),
        total_steps: int = 0,
    ) -> None:
        """`version`: members with an older one are reported; None is this program's own. The rest: see `Seen`."""
        self._foreign = foreign
        known = own_version() if version is None else version
        self._memory = Memory(stages, known, total_steps)

    def __call__(self, sightings: Sequence[Sighting], now: float) -> list[Finding]:
        """The verdict at wall clock `now`."""
        return verdict(replace(self._memory.look(sightings, now), foreign=self._foreign(now)))


class Voice:
    """Says a finding when it comes, when it gets worse, and when it is over; not that its numbers change.

    Mutable state: those that stand, by kind and stage.
    """

    def __init__(self) -> None:
        self._standing: dict[tuple[str, int | None], Finding] = {}

    def note(self, findings: Sequence[Finding]) -> None:
        """Log what has changed in what is found now; what is fine is not worth a line."""
        found = {(f.kind, f.stage): f for f in findings if f.severity > Severity.FINE}
        for key, finding in found.items():
            before = self._standing.get(key)
            if before is None or finding.severity > before.severity:
                logger.warning("%s.", finding.sentence)
        fine = {(f.kind, f.stage) for f in findings} - found.keys()  # still so, and no news any more
        for key in self._standing.keys() - found.keys() - fine:
            logger.info("No longer: %s.", self._standing[key].sentence)
        self._standing = found
