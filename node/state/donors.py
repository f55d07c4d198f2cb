"""Whose state belongs together: the donors of a download, chosen by what they say of themselves. Pure.

A replica of a stage that trains and one that began anew from the seed while it could not be seen hold unrelated
weights; pieces of both are no model. So the donors of one download come from one group, of replicas that are about
as far as each other: the largest one, and of two as large the one that is further. Replicas in their first rounds
give theirs only where there are no others. What one of them alone says moves nothing: the median of the group counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from protocol.manifest import Manifest
from protocol.transport.base import PeerId

FRESH_ROUNDS = 2  # a replica this young may have begun anew
NEAR_ROUNDS = 4  # between two of a group, or
NEAR_SHARE = 0.25  # of their rounds: replicas of other speeds are further apart the older they are
FASTEST_ROUND = 0.25  # seconds: a round's exchange takes longer on the links that downloads take
LONGEST_ROUND = 5  # times k inner steps: the longest nominal round and its window


@dataclass(frozen=True)
class DonorProgress:
    """How far a replica is: inner and outer steps."""

    step: int
    round: int


@dataclass(frozen=True)
class RunLimits:
    """What the run's manifest says about every replica's progress."""

    total_steps: int
    inner_steps: int  # k

    @classmethod
    def of(cls, manifest: Manifest) -> RunLimits:
        return cls(manifest.inner.total_steps, manifest.outer.inner_steps)


def together(told: Mapping[PeerId, DonorProgress]) -> dict[PeerId, DonorProgress]:
    """The donors among those that told how far they are; empty when nobody told anything that can be."""
    possible = {peer: progress for peer, progress in told.items() if progress.round <= progress.step}
    established = {peer: progress for peer, progress in possible.items() if progress.round > FRESH_ROUNDS}
    groups = _groups(established or possible)
    return max(groups, key=lambda group: (len(group), _furthest(group)), default={})


def _groups(told: Mapping[PeerId, DonorProgress]) -> list[dict[PeerId, DonorProgress]]:
    """Cut where one replica is too far from the next one."""
    ordered = sorted(told, key=lambda peer: (told[peer].round, peer))
    groups = [{peer: told[peer]} for peer in ordered[:1]]
    for before, peer in pairwise(ordered):
        near = max(NEAR_ROUNDS, NEAR_SHARE * told[peer].round)
        if told[peer].round - told[before].round > near:
            groups.append({})
        groups[-1][peer] = told[peer]
    return groups


def _furthest(group: Mapping[PeerId, DonorProgress]) -> int:
    return max(progress.round for progress in group.values())


def follows(now: DonorProgress, before: DonorProgress, seconds: float, limits: RunLimits) -> bool:
    """Whether a replica that was as far as `before` can be as far as `now`, so many seconds later."""
    rounds = NEAR_ROUNDS + seconds / FASTEST_ROUND
    steps = rounds * LONGEST_ROUND * limits.inner_steps
    return 0 <= now.round - before.round <= rounds and 0 <= now.step - before.step <= steps


def adopted(donors: Sequence[DonorProgress], limits: RunLimits) -> DonorProgress:
    """What a replica made of these donors' pieces may call its own: their medians, within the run's length."""
    step = min(median_low(donor.step for donor in donors), limits.total_steps)
    return DonorProgress(step, min(median_low(donor.round for donor in donors), step))
