"""Which stage a newcomer takes, decided by each newcomer for itself from the same records. Pure.

First the stage that can do least, since the swarm is as fast as that. Stages that are closer than can be measured
count as equally poor; of those a newcomer takes the one to which its links are best, as far as it knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from node.membership.capacity import Capacities, Peer
from protocol.transport.base import PeerId

ALIKE = 1.08  # capacities within this factor count as equal: equal machines measure themselves that far apart

Arrival = tuple[float, PeerId]  # wall clock and peer id: the order in which newcomers have their turn


def poorest_stages(capacities: Capacities, allowed: Collection[int]) -> list[int]:
    """Of the stages allowed, those that can do least; the one with the fewest replicas first, then the earliest."""
    least = min(capacities.of[stage] for stage in allowed)
    alike = [stage for stage in allowed if capacities.of[stage] <= ALIKE * least]
    return sorted(alike, key=lambda stage: (capacities.replicas[stage], stage))


def choose_stage(
    peers: Sequence[Peer],
    work: Sequence[float],
    newcomers: Collection[Arrival],
    me: Arrival,
    may_serve: Collection[int],
    excess: Mapping[int, float] | None = None,
) -> int:
    """The stage for `me`, one of several newcomers that choose at the same time.

    `peers` are those that have a stage already. `newcomers` are taken in the order of their arrival, and those
    before `me` are expected to go where the swarm is poorest. `excess`: see `link_cost.excess_seconds`; without it
    the stage with the fewest replicas is taken among equally poor ones.
    """
    capacities = Capacities(peers, work)
    for newcomer in sorted(set(newcomers)):
        if newcomer >= me:
            break
        capacities.add_newcomer(poorest_stages(capacities, range(len(work)))[0])
    stages = poorest_stages(capacities, may_serve)
    return min(stages, key=lambda stage: excess.get(stage, 0.0)) if excess else stages[0]


def better_stage(
    peers: Sequence[Peer],
    work: Sequence[float],
    me: PeerId,
    may_serve: Collection[int],
    *,
    by_links: bool = False,
    is_last_word: bool = False,
) -> int | None:
    """Where `me`, whose claim is among the `peers`, should go instead, when too many newcomers met at a stage.

    Of the newcomers at a stage only the last one to come goes elsewhere, so that not all who met there leave; with
    `is_last_word` any. Who chose among equally poor stages `by_links` stays while they are equally poor.
    """
    capacities = Capacities(peers, work)
    mine = capacities.peers[me]
    newcomers = [p for p in capacities.peers.values() if p.stage == mine.stage and not p.is_serving]
    if not is_last_word and any((p.since, p.peer) > (mine.since, me) for p in newcomers):
        return None
    others = Capacities([p for p in capacities.peers.values() if p.peer != me], work)
    stages = poorest_stages(others, may_serve)
    is_smallest = others.replicas[mine.stage] == others.replicas[stages[0]]
    if mine.stage in stages and (by_links or is_smallest):
        return None
    return stages[0]
