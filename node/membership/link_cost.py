"""What a newcomer's links would do to the steps of the run at each stage. Pure.

The planner's step time (docs/placement.md) where a microbatch's way is what takes time: L·(1 + (B − 1)/F) + G/k, with
L twice the sum of the mean hops and G the mean time of a pair's exchange. A newcomer of a stage with n replicas makes
its mean hops and its mean exchange change by 1/(n + 1) of the difference between its own links and theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from protocol.link_report import PEER_CHARACTERS, LinkReport
from protocol.transport.base import PeerId

IN_FLIGHT = 16  # F, microbatches of a replica on the way: what the planner takes, too


@dataclass(frozen=True)
class Volumes:
    """Of a run: bytes of a microbatch's activations and of a round's exchange, and how often each travels."""

    activations: int
    exchange: int
    microbatches: int  # B, of an inner step
    inner_steps: int  # k, of a round


class LinkTable:
    """Mutable state: round trip and bandwidth between peers, both directions alike, as reported by either."""

    def __init__(self) -> None:
        self._round_trips: dict[frozenset[str], float] = {}
        self._bandwidths: dict[frozenset[str], float] = {}

    def add(self, peer: PeerId, reports: Iterable[LinkReport]) -> None:
        """The longer of two reports of a round trip counts, and the slower of two of a bandwidth."""
        for report in reports:
            pair = frozenset((peer[-PEER_CHARACTERS:], report.peer))
            self._round_trips[pair] = max(report.round_trip, self._round_trips.get(pair, 0.0))
            if report.bandwidth is not None:
                known = self._bandwidths.get(pair, report.bandwidth)
                self._bandwidths[pair] = min(report.bandwidth, known)

    def seconds(self, one: PeerId, other: PeerId, nbytes: int) -> float | None:
        """For so many bytes, one way; None when the link is not known."""
        pair = frozenset((one[-PEER_CHARACTERS:], other[-PEER_CHARACTERS:]))
        if pair not in self._round_trips or pair not in self._bandwidths:
            return None
        return self._round_trips[pair] / 2 + nbytes / self._bandwidths[pair]

    def mean_seconds(self, some: Sequence[PeerId], others: Sequence[PeerId], nbytes: int) -> float | None:
        """Over the known links between the two groups."""
        times = [self.seconds(a, b, nbytes) for a in some for b in others if a != b]
        known = [time for time in times if time is not None]
        return fmean(known) if known else None


def excess_seconds(
    me: PeerId, members: Mapping[int, Sequence[PeerId]], links: LinkTable, volumes: Volumes, stage: int
) -> float:
    """By how much a step of the run gets longer, when `me` joins the stage; less than 0 when it gets shorter.

    `members` of every stage. What is not known makes no difference.
    """
    own = members.get(stage, [])
    hops = sum(
        _difference(me, own, members.get(next_to, []), links, volumes.activations)
        for next_to in (stage - 1, stage + 1)
    )
    exchange = _difference(me, own, own, links, volumes.exchange)
    waiting = 1 + (volumes.microbatches - 1) / IN_FLIGHT
    return (2 * hops * waiting + exchange / volumes.inner_steps) / (len(own) + 1)


def _difference(
    me: PeerId, own: Sequence[PeerId], others: Sequence[PeerId], links: LinkTable, nbytes: int
) -> float:
    """Mean seconds to the others, mine less those of the stage's replicas."""
    mine = links.mean_seconds([me], others, nbytes)
    theirs = links.mean_seconds(own, others, nbytes)
    return 0.0 if mine is None or theirs is None else mine - theirs
