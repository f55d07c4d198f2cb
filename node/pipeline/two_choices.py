"""Draws two peers at random and gives the microbatch to the one with less to do. Pure.

With one random choice the queues of a stage are uneven: some replicas wait for work while others have much. A second
choice takes most of that away (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001), and
whom a microbatch meets is still drawn at random. Simulated, 128 replicas of a spot market do 0.93 instead of 0.83 of
what they could at best (docs/notebook/scaling.md).

How much a peer has to do changes with each microbatch, so it is asked each time, with a message of a few bytes. Where
that takes too long beside the work itself, the sender goes by what it has under way at either peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from node.links.trip_times import TripTimes
from node.pipeline.routing import Router
from protocol.ground import PeerId

WORTH_ASKING = 0.1  # of a typical answer to a microbatch: what the question may take
LATE = 3.0  # times what an answer takes: who has had one for so long does not get another, whatever it says


class TwoChoices:
    """Names, of two candidate peers, the one that has less to do.

    Times are seconds of one clock of the caller's.
    """

    def __init__(self, router: Router, group_of: Callable[[PeerId], Hashable] = lambda peer: peer) -> None:
        """`group_of` is the network that a peer shares its credit with; itself, once it is familiar."""
        self._router = router
        self._group_of = group_of
        self.times = TripTimes()
        self._under_way: dict[PeerId, list[float]] = {}  # when each was sent, the oldest first

    def sent(self, peer: PeerId, now: float) -> None:
        self._under_way.setdefault(peer, []).append(now)

    def returned(self, peer: PeerId, sent: float) -> None:
        """Note that a microbatch was answered, refused or given up."""
        times = self._under_way[peer]
        times.remove(sent)
        if not times:
            del self._under_way[peer]

    @property
    def holders(self) -> Collection[PeerId]:
        """The peers that have a microbatch of this sender."""
        return self._under_way.keys()

    def candidates(
        self, peers: Sequence[PeerId], exclude: Collection[PeerId] = (), waited: float = 0.0
    ) -> list[PeerId]:
        """Draw at most two of `peers`, as `Router.choose` does; the first is the one to take unasked."""
        return self._router.choose_some(2, peers, exclude, waited)

    @property
    def asks(self) -> bool:
        """True if the question takes little beside the work, as far as is known."""
        return self.times.round_trip <= WORTH_ASKING * self._router.typical_answer()

    def chosen(self, candidates: Sequence[PeerId], told: Mapping[PeerId, float], now: float) -> PeerId:
        """The candidate with less to do, by the seconds that they `told`; one that told nothing comes last.

        When none did, the one that has fewer microbatches of this sender. Whoever is late with one comes after those
        who are not: a peer that has stopped has nothing to do. Before them comes one that has never answered and has
        one, or another of its network is late: identities cost nothing. A peer that is reached through others
        counts as having as much more to do as an answer usually takes; of equals it comes last, else the first is
        taken.
        """
        late = {peer for peer in self._under_way if self._is_late(peer, now)}
        groups = set(map(self._group_of, late))
        one_more = self._router.typical_answer() if told else 1

        def rank(peer: PeerId) -> tuple[int, float, bool]:
            less = told.get(peer, math.inf) if told else len(self._under_way.get(peer, ()))
            is_new = not self._router.has_answered(peer)
            is_doubtful = is_new and (peer in self._under_way or self._group_of(peer) in groups)
            is_detour = self._router.goes_through_others(peer)
            return 2 if peer in late else int(is_doubtful), less + one_more * is_detour, is_detour

        return min(candidates, key=rank)

    def _is_late(self, peer: PeerId, now: float) -> bool:
        return now - self._under_way[peer][0] > LATE * self._router.usual_answer(peer)
