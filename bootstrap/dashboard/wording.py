"""The verdict of `bootstrap.inspect.verdict` on what a board has seen, the worst first, and as lines of a log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Finding, Seen, Severity
from bootstrap.inspect.verdict import verdict
from protocol.version import own_version

logger = logging.getLogger("noloco")


class Wording:
    """Puts the sightings of a board into findings, and remembers how long stages have been empty.

    Mutable state: since which wall clock nobody has been seen at a stage.
    """

    def __init__(self, stages: int, version: str | None = None) -> None:
        """`version`: members with an older one are told of; None is this program's own."""
        self._stages = stages
        self._version = own_version() if version is None else version
        self._empty_since: dict[int, float] = {}

    def __call__(self, sightings: Sequence[Sighting], now: float) -> list[Finding]:
        """The verdict at wall clock `now`."""
        seen = Seen(self._stages, sightings, version=self._version)
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in seen.empty}
        for_seconds = {stage: now - since for stage, since in self._empty_since.items()}
        return verdict(Seen(self._stages, sightings, for_seconds, self._version))


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
        for key in self._standing.keys() - found.keys():
            logger.info("No longer: %s.", self._standing[key].sentence)
        self._standing = found
