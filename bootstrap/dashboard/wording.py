"""The verdict of `bootstrap.inspect.verdict` on what a board has seen, the worst first."""

from __future__ import annotations

from collections.abc import Sequence

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.verdict import Finding, Seen, verdict
from protocol.version import own_version


class Wording:
    """Mutable state: since which wall clock nobody has been seen at a stage."""

    def __init__(self, stages: int, version: str | None = None) -> None:
        """`version`: whoever has an older one is told of; none is this program's own."""
        self._stages = stages
        self._version = own_version() if version is None else version
        self._empty_since: dict[int, float] = {}

    def __call__(self, sightings: Sequence[Sighting], now: float) -> list[Finding]:
        """At wall clock `now`."""
        seen = Seen(self._stages, sightings, version=self._version)
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in seen.empty}
        for_seconds = {stage: now - since for stage, since in self._empty_since.items()}
        return verdict(Seen(self._stages, sightings, for_seconds, self._version))
