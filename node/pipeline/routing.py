"""Chooses the next-stage peer for a microbatch: random, weighted by what this sender measured, never starving anyone.

What a peer says of itself can only lower its share. What it does can be a lie as well: noise is quick to make. So
nobody gets more than `MOST_SHARES` fair shares of what this sender sends, until its work was compared with others'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from node.membership.ledger import Shares, fair_shares
from node.membership.turns import MOST_SHARES, Turns
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId

ANSWERS = (
    16  # the last of a peer that count; a quarter of them were quicker than what it is taken for, since the
)
# rest waited for what it is no measure of: the end of a step, other senders' microbatches
SHORTEST = 1e-4  # seconds of an answer: below that its inverse would say too much
STRAGGLER = 2.0  # times the median answer: beyond it a sender's whole step waits, so it counts twice
FLOOR = 0.05  # of the mean weight: what the slowest peer still gets, since mixing is the point
# of its weight: a peer to which all goes through a third one, which has other things to do with its uplink
WEIGHT_THROUGH_OTHERS = 0.25
UNTRIED = 0.5  # of the mean weight: a peer of which there is no answer yet
KEPT_FOR = 8  # answers of as many as an eighth of the peers, until the typical one is taken anew
MOST_MEASURED = 1_024  # peers of which answers are kept, those that answered last
MOST_PROVEN_SHARES = 8.0  # of a peer whose answers agreed with others': its speed is believed that far


@dataclass(slots=True)
class _Measured:
    answers: list[float]  # the last seconds from sending to the answer
    seconds: float = 0.0  # that these are taken for
    taken_for: float = 0.0  # what it says of itself, if that is longer

    def note(self, seconds: float, said: float) -> None:
        """Note an answer. The peer `said` its time from admission to answer, times those that waited there."""
        self.answers.append(seconds)
        del self.answers[:-ANSWERS]
        ordered = sorted(self.answers)
        self.seconds = ordered[len(ordered) // 4]
        self.taken_for = max(self.seconds, said, SHORTEST)


class Router:
    """Chooses the next-stage peer for a microbatch at random, weighted by measured answer times."""

    def __init__(
        self,
        rng: random.Random,
        shares: Callable[[Sequence[PeerId]], Shares] = lambda peers: fair_shares(peers, lambda peer: ""),
        is_proven: Callable[[PeerId], bool] = lambda peer: False,
        goes_through_others: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        """`shares` are what each of some peers gets when all are alike; `is_proven`, whether work was compared.

        `goes_through_others` says of a peer whether a third one has to pass on what is sent to it.
        """
        self._rng = rng
        self._shares = shares
        self._is_proven = is_proven
        self.goes_through_others = goes_through_others
        self._measured = PeerTable[_Measured](MOST_MEASURED)
        self._taken_for = PeerTable[float](MOST_MEASURED)  # of the same
        self._typical, self._notes = 0.0, 0  # kept, and how many answers came since it was taken
        self.turns = Turns()  # microbatches that were sent and not refused

    def note(self, peer: PeerId, seconds: float, said: float = 0.0) -> None:
        """Note an answer `seconds` after the microbatch was sent; `said` is what the peer makes of its own load."""
        measured = self._measured[peer] = self._measured.get(peer) or _Measured([])
        measured.note(seconds, said)
        self._taken_for[peer] = measured.taken_for
        self._notes += 1

    def forget(self, peer: PeerId) -> None:
        self._measured.pop(peer, None)
        self._taken_for.pop(peer, None)

    def weights(self, peers: Sequence[PeerId], fair: Mapping[PeerId, float]) -> list[float]:
        """Relative shares: inverse to the answer time, measured or, if that is longer, said; at least `FLOOR` of
        their mean. All of that times the `fair` share, and `WEIGHT_THROUGH_OTHERS` where it goes through others.

        Beyond `STRAGGLER` medians the share falls with the square: with shares in proportion, a replica five
        times slower than its peers slowed all senders by 11 %, since it holds up each step that it has a part
        in. A peer that was never measured gets `UNTRIED` of the mean of the others.
        """
        times = list(map(self._taken_for.get, peers))
        known = [seconds for seconds in times if seconds is not None]
        patience = STRAGGLER * median(known) if known else 0.0
        raw = [1 / seconds if seconds <= patience else patience / seconds / seconds for seconds in known]
        if len(known) < len(times):
            untried, of_known = UNTRIED * fmean(raw) if raw else 1.0, iter(raw)
            raw = [untried if seconds is None else next(of_known) for seconds in times]
        floor = FLOOR * fmean(raw) if raw else 0.0
        return [
            (weight if weight > floor else floor) * fair[peer] * self._of_way(peer)
            for weight, peer in zip(raw, peers, strict=True)
        ]

    def _of_way(self, peer: PeerId) -> float:
        return WEIGHT_THROUGH_OTHERS if self.goes_through_others(peer) else 1.0

    def choose(
        self, peers: Sequence[PeerId], exclude: Collection[PeerId] = (), waited: float = 0.0
    ) -> PeerId | None:
        """One of `peers` outside `exclude`, None when there is none that does not have its share already.

        `waited` is how long, in seconds, the others have been taking nothing: longer than answers take, and the share
        is no matter. A stage whose other replicas refuse everything would train no more.
        """
        chosen = self.choose_some(1, peers, exclude, waited)
        return chosen[0] if chosen else None

    def choose_some(
        self, most: int, peers: Sequence[PeerId], exclude: Collection[PeerId] = (), waited: float = 0.0
    ) -> list[PeerId]:
        """Choose at most `most` different ones, each drawn as by `choose`."""
        shares = self._shares(peers)
        full = self._full(shares) if not waited or waited <= self.typical_answer() else set()
        out = full.union(exclude)
        candidates = [peer for peer in peers if peer not in out] if out else peers
        weights = self.weights(candidates, shares.of_peer)
        chosen: list[PeerId] = []
        while len(chosen) < min(most, len(candidates)):
            [place] = self._rng.choices(range(len(candidates)), weights)
            chosen.append(candidates[place])
            weights[place] = 0.0
        return chosen

    def is_full(self, peer: PeerId, peers: Sequence[PeerId]) -> bool:
        """Return whether the peer has all of the last microbatches that one of the `peers` gets."""
        return peer in self._full(self._shares(peers))

    def _full(self, shares: Shares) -> set[PeerId]:
        return self.turns.full(shares, lambda p: MOST_PROVEN_SHARES if self._is_proven(p) else MOST_SHARES)

    def usual_answer(self, peer: PeerId) -> float:
        """Seconds that this peer, or a typical one if that is longer, takes by this sender's clock."""
        measured = self._measured.get(peer)
        return max(self.typical_answer(), measured.seconds if measured is not None else 0.0)

    def has_answered(self, peer: PeerId) -> bool:
        """Return whether the peer has answered since it failed last, if ever."""
        return peer in self._measured

    def typical_answer(self) -> float:
        """Seconds, the median over the peers; 0 before the first answer."""
        if self._notes * KEPT_FOR >= len(self._measured):
            times = [measured.seconds for measured in self._measured.values()]
            self._typical, self._notes = median(times) if times else 0.0, 0
        return self._typical


class FixedRouter(Router):
    """The baseline: the n-th replica of a stage, by peer id, sends to the n-th of the next while both live."""

    def __init__(self, rng: random.Random, place: Callable[[], int]) -> None:
        super().__init__(rng)
        self._place = place

    def choose(
        self, peers: Sequence[PeerId], exclude: Collection[PeerId] = (), waited: float = 0.0
    ) -> PeerId | None:
        if not peers:
            return None
        own = peers[self._place() % len(peers)]
        return own if own not in exclude else super().choose(peers, exclude, waited)
