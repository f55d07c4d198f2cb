"""Decides who averages with whom: a handshake between two replicas, with no common view and no coordinator. Pure.

A replica can hold an agreement for the round that goes on and one for the round after it. At a random moment in
the first half of its round it proposes, to random replicas, in a large stage two at a time, until one agrees; when
the other does so too, it is released. Whoever is asked accepts for whichever of its own two rounds can end together
with the proposer's. So it makes no difference who is a little ahead: one that has not yet ended its last round is as
likely a partner as any other, and pairs that ended together do not find each other more often. A replica that nobody
has room for proposes for its next round instead. It then has a partner before others look for theirs, and is not
alone twice in a row. It also asks a random one of those who had no room to be left over in its turn, so that this is
not always one of the slow.

Towards the end of a search next to all are engaged, and those who are not have a proposal under way to one that is.
So whoever several have refused takes the first that asks, and gives its own proposal up: else the last ones of a
large stage would find each other busy again and again. And whoever is engaged tells the next that it refuses of the
last one that it refused before. In a large stage that one is hardly ever known: its record is wanted first (`wants`),
and whoever drives this asks for it. There the partner of the round before is not asked either: its record stays
known, and it would be met again more often than by chance.

The round ends together at a time that both computed from the same four numbers each. The one with the longer
inner steps ends it, at the end of its step nearest to that time, and says so; the other follows at the end of
the step that it is in. Neither stops training before. A replica that has found nobody ends its round alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from enum import IntEnum

from node.rounds.meeting import (
    LONGEST,
    Agreement,
    Bounds,
    FragmentOrder,
    Meeting,
    Pair,
    Proposal,
    Refusal,
    RoundProgress,
)
from node.rounds.prospects import RECENT, Prospects, Seekers
from protocol.ground import PeerId

SEEKS_UNTIL = 0.5  # of a round: by then everybody has begun to look for a partner
# Of those asked first half are engaged: with one at a time the median search in a large stage is two round trips. Of
# few candidates one after another is asked: whoever is released might find that nobody is left.
ASKED_TOGETHER, FEW = 2, 10
SITS_OUT_UNTIL = 0.6  # of a round: by then those who can have found one
# Of more replicas that are known than so many, the partner of the round before is not asked: it is known better.
MANY = 64
APART = 0.1  # steps between two rounds' ends, more than what two replicas may make of one moment
PATIENCE = 2.0  # steps that may be waited at the end for a partner that is late: better than to be alone

LATEST = 0.5  # of a round: who claims to take longer steps than this allows for is not waited for


class Slot(IntEnum):
    CURRENT = 0  # the round that goes on
    NEXT = 1


SLOTS = tuple(Slot)


class Pairing:
    """The state machine of pairing: proposals in, proposals out, and the agreements that result."""

    def __init__(
        self, me: PeerId, inner_steps: int, window: float, rng: random.Random, fragments: int = 1
    ) -> None:
        self.me = me
        self.fragments = FragmentOrder(fragments)
        self._window = window
        self._rng = rng
        # whoever measures these may say so, in seconds:
        self.pause = 0.0  # from the last inner step of a round to the first of the next one
        self.handshake = 0.0  # what the answer to a proposal takes
        self.at_once = False  # the replica trains no more: its round can end at any time
        # by slot:
        self._agreed: list[Agreement | None] = [None, None]
        self._search = [Prospects(), Prospects()]
        self._seekers = Seekers()
        self._asking: dict[Pair, Slot] = {}  # proposed and not answered yet, and what for
        self._sought = Slot.CURRENT  # what for the last one was
        self._together = 1  # may be asked at a time
        self._in_step = True  # somebody's round could end when this one can
        self._round_seconds = 0.0  # that the last round with a partner took
        self.begin_round(inner_steps)

    def __repr__(self) -> str:
        now, later = (f"…{one.pair.partner[-8:]}" if one is not None else "nobody" for one in self._agreed)
        asking = "".join(f", asks …{pair.partner[-8:]}" for pair in self._asking)
        ending = ", at its end," if self.is_ending else ""
        return f"<Pairing of …{self.me[-8:]}: this round{ending} with {now}, the next with {later}{asking}>"

    def begin_round(self, inner_steps: int) -> None:
        """Begin the next round with what was agreed on for it."""
        self.fragments.round_ended(self.current.pair.name if self.current is not None else None)
        self._was_alone = self.current is None
        self._last = self.current.pair.partner if self.current is not None else None
        self.bounds = Bounds.of(inner_steps, self._window)
        self._agreed = [self._agreed[Slot.NEXT], None]
        self._asking = {pair: Slot.CURRENT for pair, slot in self._asking.items() if slot is Slot.NEXT}
        self._sought = Slot.CURRENT
        self._search = [self._search[Slot.NEXT], Prospects()]
        # In step with others, an even rhythm keeps it so; out of step, an uneven one brings them together.
        uneven = self._was_alone and not self._in_step
        self._alone_at = (
            self._rng.randint(self.bounds.opens_at, self.bounds.ends_at) if uneven else inner_steps
        )
        self._seek_at = 0.0 if self._was_alone else self._rng.uniform(0, SEEKS_UNTIL)  # of the round
        self._in_step = False
        self._exhausted = False  # everybody has refused for this round
        self.is_ending = False

    def end_round(self, here: RoundProgress) -> None:
        """End the inner steps: from here on only the next round is agreed on."""
        self.is_ending = True
        self._ended_at = here.now
        if self.current is not None:
            self._round_seconds = here.steps * here.step_seconds
        self._withdraw(Slot.CURRENT)

    @property
    def current(self) -> Agreement | None:
        """The agreement for the round that goes on."""
        return self._agreed[Slot.CURRENT]

    @property
    def agreements(self) -> list[Agreement]:
        return [agreement for agreement in self._agreed if agreement is not None]

    # --- looking for a partner ----------------------------------------------------------------

    def seeks_in(self, here: RoundProgress) -> float:
        """Seconds until it is time to look for a partner, should there be none by then.

        They are parts of the time that rounds with others take: in parts of k steps, the slow would always be late.
        """
        step, bounds = here.step_seconds, self.bounds
        seconds = min(max(self._round_seconds, bounds.opens_at * step), bounds.ends_at * step)
        share = SITS_OUT_UNTIL if self._search[Slot.CURRENT].sits_out else self._seek_at
        return max(0.0, share * seconds - here.steps * step - here.into_step)

    def propose(
        self, candidates: Sequence[PeerId], here: RoundProgress, through_others: Collection[PeerId] = ()
    ) -> Proposal | None:
        """Ask one of the candidates that may be willing at random; None when there is nothing to ask.

        All are as likely, but for those that are reached `through_others`: see `Prospects.choose`.
        While that is under way another one may be asked.
        """
        too_early = self.seeks_in(here) > 0 and not self.at_once
        self._together = ASKED_TOGETHER if len(candidates) > FEW else 1
        if not self.may_ask_another or self.current is not None or too_early:
            return None
        too_late = self.is_ending or (not self.at_once and here.until(self.bounds.ends_at) <= self.handshake)
        if self._last is not None and len(candidates) > MANY:
            self._search[Slot.CURRENT].bar(self._last)
        now = None if too_late else self._choice(Slot.CURRENT, candidates, here.steps, through_others)
        self._exhausted = now is None and not self._asks_for(Slot.CURRENT)
        sits_out, self._search[Slot.CURRENT].sits_out = self._search[Slot.CURRENT].sits_out, False
        # one that was to be left over expects nothing of this round
        asks_later = not self.at_once and (sits_out or self._exhausted)
        later = self._choice(Slot.NEXT, candidates, here.steps, through_others) if asks_later else None
        slot, chosen = (Slot.CURRENT, now) if later is None else (Slot.NEXT, later)
        if chosen is None:
            return None
        # who trains no more has time for all of it
        pair = Pair(chosen, self.fragments.name(self._rng, is_of_all=self.at_once))
        self._asking[pair] = self._sought = slot
        self._search[slot].asked.add(chosen)
        return Proposal(pair, self._meeting(slot, here), here.now)

    @property
    def may_ask_another(self) -> bool:
        """True if fewer answers are awaited than may be, with as many candidates as there were last."""
        return len(self._asking) < self._together

    @property
    def is_asking(self) -> bool:
        """True while an answer to a proposal is awaited."""
        return bool(self._asking)

    def _choice(
        self, slot: Slot, candidates: Sequence[PeerId], steps: int, through_others: Collection[PeerId]
    ) -> PeerId | None:
        if self._agreed[slot] is not None:
            return None
        return self._search[slot].choose(candidates, self.me, steps, self._rng, through_others)

    def forget_refusals(self) -> None:
        """Let everyone be asked again: time has passed."""
        for search in self._search:
            search.forget()

    def accepted(self, proposal: Proposal, theirs: Meeting, here: RoundProgress) -> bool:
        """Take a yes. False when it is not wanted any more, or makes no sense: the other must be told."""
        slot = self._slot_of(proposal.pair)
        if slot is None:
            slot = self._answered(proposal.pair)
        if slot is None:
            return False
        is_new = self._agreed[slot] is None
        meets_in = proposal.mine.match(theirs, 0.0 if is_new else PATIENCE) if theirs.is_possible else None
        # as the other computed it half way
        meets_at = (proposal.sent_at + here.now) / 2 + meets_in if meets_in is not None else math.nan
        if meets_in is None or (is_new and not self._is_in_order(slot, meets_at, here)):
            self._agreed[slot] = None
            self._search[slot].bar(proposal.pair.partner)
            return False
        self._agree(slot, Agreement.of(proposal.pair, self.me, meets_at, proposal.mine, theirs, here.now))
        return True

    def refused(self, proposal: Proposal, refusal: Refusal, here: RoundProgress) -> None:
        """Take a no, or a lost answer (with a code of the caller's); a pair agreed before is dropped."""
        if self.drop(proposal.pair):
            return
        slot = self._answered(proposal.pair)
        if slot is None:
            return  # another one was agreed on meanwhile
        self._in_step = self._in_step or refusal.code in ("busy", "engaged")
        retry_at = here.steps + max(1, self.bounds.ends_at - self.bounds.nominal)
        self._search[slot].note(proposal.pair.partner, refusal, retry_at)

    def wants(self, peer: PeerId) -> bool:
        """Return whether it is worth a round trip to get to know a replica that an engaged one has told of."""
        if peer == self.me or self._agreed[self._sought] is not None:
            return False
        return self._search[self._sought].wants(peer)

    def on_proposal(self, pair: Pair, theirs: Meeting, here: RoundProgress) -> Meeting | Refusal:
        """Answer a replica that proposes, or asks whether a pair still holds: what to accept with, or why not."""
        known = self._slot_of(pair)
        refusal = Refusal("out-of-step")
        for slot in SLOTS if known is None else (known,):
            if known is None and (self.is_ending if slot is Slot.CURRENT else self.at_once):
                continue
            mine = self._meeting(slot, here)
            patience = 0.0 if known is None else PATIENCE
            meets_in = theirs.match(mine, patience) if theirs.is_possible else None
            if meets_in is None or (known is None and not self._is_in_order(slot, here.now + meets_in, here)):
                continue
            self._in_step = self._in_step or slot is Slot.CURRENT
            agreement = self._agreed[slot]
            if agreement is not None and slot is not known:
                refusal = Refusal("engaged", agreement.pair.partner, self._referral(pair.partner, here.now))
            elif agreement is None and self._search[slot].sits_out:
                refusal = Refusal("engaged")
            elif not self._yields(slot, pair.partner):
                refusal = Refusal("busy")
            else:
                self._agree(slot, Agreement.of(pair, self.me, here.now + meets_in, mine, theirs, here.now))
                return mine
        self.drop(pair)
        return refusal

    def _referral(self, proposer: PeerId, now: float) -> PeerId | None:
        return self._seekers.refuse(proposer, now, RECENT * self.handshake)

    def successor(self, here: RoundProgress) -> tuple[PeerId, Meeting] | None:
        """Pick who is left over in the next round, when this one is alone among others; and when that may end."""
        agreement = self._agreed[Slot.NEXT]
        if self.current is not None or agreement is None or not self._exhausted:
            return None
        search = self._search[Slot.CURRENT]
        engaged, search.engaged = [peer for peer in search.engaged if peer != agreement.pair.partner], []
        return (self._rng.choice(engaged), self._meeting(Slot.NEXT, here)) if engaged else None

    def on_sit_out(self, theirs: Meeting, here: RoundProgress) -> bool:
        """Answer another that asks this replica to be left over in the round that ends with its own; False for no."""
        for slot in SLOTS:
            is_free = self._agreed[slot] is None and not self._asks_for(slot)
            in_turn = self.current is not None if slot is Slot.NEXT else self.seeks_in(here) > 0
            meets = theirs.is_possible and theirs.match(self._meeting(slot, here)) is not None
            if is_free and in_turn and meets:
                self._search[slot].sits_out = True
                return True
        return False

    def _yields(self, slot: Slot, proposer: PeerId) -> bool:
        """Return whether ours yields: to a smaller peer id where two cross, to any other if it has little hope."""
        if not self._asks_for(slot):
            return True
        crosses = proposer in self._search[slot].asked
        if proposer < self.me if crosses else self._search[slot].is_late:
            self._withdraw(slot)
            return True
        return False

    def _asks_for(self, slot: Slot) -> bool:
        return slot in self._asking.values()

    def _answered(self, pair: Pair) -> Slot | None:
        """What the pair was proposed for; None where it is not wanted any more."""
        slot = self._asking.pop(pair, None)
        if slot is not None:
            self._search[slot].asked.discard(pair.partner)
        return slot

    def _withdraw(self, slot: Slot) -> None:
        """Want nothing any more of what was proposed for this round or the next: who agrees to it is told."""
        self._asking = {pair: other for pair, other in self._asking.items() if other is not slot}
        self._search[slot].asked.clear()

    # --- holding to it ------------------------------------------------------------------------

    def _is_in_order(self, slot: Slot, meets_at: float, here: RoundProgress) -> bool:
        """Return whether this round's pair, one of them to be made now, comes before that of the next round.

        Whoever has ended its round waits for a partner that is in the round before, and so for a pair made for an
        earlier time: never in a circle.
        """
        other = self._agreed[1 - slot]
        if other is None:
            return True
        first, second = (meets_at, other.place) if slot is Slot.CURRENT else (other.place, meets_at)
        return first + APART * here.step_seconds <= second

    def _agree(self, slot: Slot, agreement: Agreement) -> None:
        known = self._agreed[slot]
        if known is not None and known.pair == agreement.pair:
            agreement.partner_ready, agreement.place = known.partner_ready, known.place
        self._agreed[slot] = agreement
        self._withdraw(slot)
        self._in_step = self._in_step or slot is Slot.CURRENT

    def _slot_of(self, pair: Pair) -> Slot | None:
        for slot, agreement in zip(SLOTS, self._agreed, strict=True):
            if agreement is not None and agreement.pair == pair:
                return slot
        return None

    def holds(self, pair: Pair) -> bool:
        """Return whether the pair is agreed on, for this round or the next."""
        return self._slot_of(pair) is not None

    def drop(self, pair: Pair) -> bool:
        """Give the pair up. Its partner is not asked again in that round. False for a pair that is not ours."""
        slot = self._slot_of(pair)
        if slot is None:
            return False
        self._agreed[slot] = None
        self._search[slot].bar(pair.partner)
        return True

    def renewal(self, here: RoundProgress) -> Proposal | None:
        """The pair of this round to propose once more: does the partner live, and when will it be there?"""
        agreement = self.current
        if agreement is None or self.is_ending:
            return None
        return Proposal(agreement.pair, self._meeting(Slot.CURRENT, here), here.now)

    def must_renew(self, here: RoundProgress, in_doubt: bool) -> bool:
        """Return whether to renew the pair now; `in_doubt` when there are signs that the partner is gone."""
        return self.current is not None and self.current.must_renew(here, self.bounds.nominal, in_doubt)

    # --- ending the round ---------------------------------------------------------------------

    def _meeting(self, slot: Slot, here: RoundProgress) -> Meeting:
        """The time at which the round of this slot may end."""
        if slot is Slot.CURRENT:
            meeting = self.bounds.meeting(here)
            if not (self.is_ending or self.at_once):
                return meeting
            return Meeting(0.0, 0.0, LONGEST if self.is_ending else meeting.ends_in, 0.0)
        return self.bounds.meeting_after(self._ends_in(here) + self.pause, here.step_seconds)

    def _ends_in(self, here: RoundProgress) -> float:
        """Seconds until the end of this round, as far as it is known; negative when it was before."""
        if self.is_ending:
            return max(self._ended_at - here.now, -self.pause)
        if self.current is not None:
            return max(0.0, self.current.meets_at - here.now)
        return here.until(self._alone_at)

    def partner_by(self, here: RoundProgress) -> float:
        """Seconds until the partner has ended its round, at the latest; 0 with none."""
        if self.current is None:
            return 0.0
        # what `Meeting.match` allows: it may miss the moment by the step that it is in, and by `PATIENCE` more
        latest = max(0.0, self.current.meets_at - here.now) + (1 + PATIENCE) * self.current.partner_step
        return min(latest, LATEST * self.bounds.nominal * here.step_seconds)

    def on_ready(self, pair: Pair) -> bool:
        """Note that the partner's round has come to its end; False for a pair that is not ours."""
        for agreement in self.agreements:
            if agreement.pair == pair:
                agreement.partner_ready = True
                return True
        return pair in self._asking  # its yes is still on the way

    def is_ready(self, here: RoundProgress) -> bool:
        """Return whether to tell the partner that this round must end before long."""
        return self.current is not None and self.current.is_ready(here, self.bounds)

    def must_end(self, here: RoundProgress) -> bool:
        if self.current is not None:
            return self.current.must_end(here, self.bounds)
        found_nobody = self._exhausted and not self._asks_for(Slot.CURRENT)
        return here.steps >= self.bounds.ends_at or (here.steps >= self._alone_at and found_nobody)
