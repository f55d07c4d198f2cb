"""Whom a replica asks for a round, in which order; whom others that are engaged send to it. Pure; clock passed in."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Sequence

from node.rounds.meeting import Refusal
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId

DRAWS = 4  # of candidates, before those that may be asked are listed
LATE = 3  # engaged replicas asked: with 1 or 2 it is no different
# of the chance of others: a replica with which all goes through a third peer. Pairs mix weights, so it is not less.
CHANCE_THROUGH_OTHERS = 0.5
REFERRED = 8  # replicas that look for a partner, that one remembers who is asked, and one that asks
REFERRED_AFTER = 3  # engaged replicas asked: before, a random one is as likely to be free
RECENT = 32.0  # round trips: longer ago, a replica that looked for a partner has one
ASKED_AT_MOST = 128  # in one round: in a large stage, one that is free still is found long before


class Seekers:
    """Replicas that asked here a moment ago and were refused: two of them that hear of each other may be a pair."""

    def __init__(self) -> None:
        self._asked = PeerTable[float](REFERRED)  # when

    def refuse(self, peer: PeerId, now: float, recent: float) -> PeerId | None:
        """Note that `peer` is refused; return the last other one that was within `recent` seconds."""
        others = [other for other, at in self._asked.items() if other != peer and now - at <= recent]
        self._asked[peer] = now
        return others[-1] if others else None


class Prospects:
    """Says which replica to ask next for a round, and whom not to ask again yet."""

    def __init__(self) -> None:
        self._refused: dict[PeerId, float] = {}  # until which inner step
        self.asked = set[PeerId]()  # and have not answered yet
        self.engaged: list[PeerId] = []
        self._referred = deque[PeerId](maxlen=REFERRED)  # to others that look for one, by the engaged
        self.sits_out = False  # asked to be the one that is left over

    def choose(
        self,
        candidates: Sequence[PeerId],
        me: PeerId,
        steps: int,
        rng: random.Random,
        through_others: Collection[PeerId] = (),
    ) -> PeerId | None:
        """Return a random candidate that may agree after `steps` inner steps of the round; None without one.

        A candidate of `through_others` is `CHANCE_THROUGH_OTHERS` as likely as another. Late in a search a candidate
        that an engaged replica has named comes first.
        """
        if len(self._refused) >= ASKED_AT_MOST or not candidates:
            return None

        def may_agree(peer: PeerId) -> bool:
            return peer != me and self._refused.get(peer, -math.inf) <= steps and peer not in self.asked

        while self._referred and self._goes_by_referrals:
            if may_agree(peer := self._referred.pop()) and peer in candidates:
                return peer
        for _ in range(DRAWS):  # in a large stage nearly all may
            if may_agree(peer := rng.choice(candidates)) and (
                peer not in through_others or rng.random() < CHANCE_THROUGH_OTHERS
            ):
                return peer
        willing = [peer for peer in candidates if may_agree(peer)]
        if not through_others or not willing:
            return rng.choice(willing) if willing else None
        [chosen] = rng.choices(
            willing, [CHANCE_THROUGH_OTHERS if p in through_others else 1.0 for p in willing]
        )
        return chosen

    @property
    def _goes_by_referrals(self) -> bool:
        return len(self.engaged) >= 2 * REFERRED_AFTER

    def wants(self, peer: PeerId) -> bool:
        """Return whether one that was told of may be the next to be asked, once its record is known."""
        return self._goes_by_referrals and peer not in self._refused

    @property
    def is_late(self) -> bool:
        """True if so many have refused that the next one asked will hardly agree either."""
        return len(self.engaged) >= 2 * LATE

    def bar(self, peer: PeerId, until: float = math.inf) -> None:
        self._refused[peer] = until

    def note(self, peer: PeerId, refusal: Refusal, retry_at: int) -> None:
        """Note that `peer` refused; being out of step may be over at inner step `retry_at`."""
        if refusal.code == "out-of-step":  # both sides' windows move with time
            self.bar(peer, retry_at)
        elif refusal.code != "busy":  # that one may be free again in a moment
            self.bar(peer)
        if refusal.engaged_with is not None:
            self.bar(refusal.engaged_with)
            self.engaged += [peer, refusal.engaged_with]
        if refusal.seeker is not None:
            self._referred.append(refusal.seeker)

    def forget(self) -> None:
        """Let everyone be asked again: time has passed."""
        self._refused.clear()
