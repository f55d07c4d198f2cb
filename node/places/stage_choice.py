"""Which stage a newcomer takes, decided by each newcomer for itself from the same records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from protocol.transport.base import PeerId


def choose_stage(
    stages: int,
    replicas: Mapping[int, int],
    newcomers: Sequence[tuple[float, PeerId]],
    me: tuple[float, PeerId],
    able: Collection[int] = (),
) -> int:
    """The stage for `me`, one of several newcomers that choose at the same time.

    `replicas` counts those that serve each stage already; `newcomers` are (joined at, peer id). Newcomers are
    taken in that order and each goes to the stage with the fewest replicas, the earliest stage first, so
    newcomers that see the same records spread evenly without talking to each other. `able` are the stages that
    this one can hold; with none it takes its place all the same, and is told then what it lacks.
    """
    counts = [replicas.get(stage, 0) for stage in range(stages)]
    for newcomer in sorted({*newcomers, me}):
        if newcomer == me and able:
            return min(sorted(able), key=counts.__getitem__)
        stage = counts.index(min(counts))
        if newcomer == me:
            return stage
        counts[stage] += 1
    raise AssertionError("me is always among the newcomers")
