"""Which stage a newcomer takes, decided by each newcomer for itself from the same records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocol.transport.base import PeerId


def choose_stage(
    stages: int,
    replicas: Mapping[int, int],
    newcomers: Sequence[tuple[float, PeerId]],
    me: tuple[float, PeerId],
) -> int:
    """The stage for `me`, one of several newcomers that choose at the same time.

    `replicas` counts those that serve each stage already; `newcomers` are (joined at, peer id). Newcomers are
    taken in that order and each goes to the stage with the fewest replicas, the earliest stage first, so
    newcomers that see the same records spread evenly without talking to each other.
    """
    counts = [replicas.get(stage, 0) for stage in range(stages)]
    for newcomer in sorted({*newcomers, me}):
        stage = counts.index(min(counts))
        if newcomer == me:
            return stage
        counts[stage] += 1
    raise AssertionError("me is always among the newcomers")
