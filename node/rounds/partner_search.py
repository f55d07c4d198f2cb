"""The search for the partner of each round: events in, actions out. Pure; clock and random generator passed in.

`Pairing` decides who averages with whom. This decides everything around it: when to look for a partner and whom to
ask, what to answer, when to give a proposal up, whom to release, and which record to ask for. The daemon
(`Matchmaker`) and the simulator drive the same machine.

The search asks one replica after another in its first lane, and in a large stage another one beside it. A lane whose
proposal is refused goes on with the next replica. One that is told "busy" rests: the first lane for some
milliseconds, the other until the first one asks again.
"""

from __future__ import annotations

import random
from enum import Enum, auto
from typing import assert_never

from node.membership.ledger import thinned
from node.membership.turns import Turns
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal, RoundProgress
from node.rounds.pace import Tempo
from node.rounds.pairing import Pairing
from node.rounds.search_events import (
    Action,
    Agreed,
    AskedToSitOut,
    Asker,
    AskForRecord,
    Event,
    Lane,
    LastSearchBegan,
    LastSearchEnded,
    LastSearchStopped,
    LookAround,
    Looked,
    PairsDropped,
    PartnerReady,
    PartnerReleased,
    ProposalAnswered,
    ProposalLost,
    Proposed,
    ReadyAnswered,
    RecordArrived,
    Reply,
    Retired,
    RoundBegan,
    RoundEnded,
    SendProposal,
    SendReady,
    SendRelease,
    SendSitOut,
    SetTimer,
    StepDone,
    StepJudged,
    StepsCounted,
    StopTimer,
    Suspect,
    TimerFired,
)
from protocol.ground import PeerId

BUSY_SECONDS = 0.02  # before asking again: a handshake takes milliseconds


class Phase(Enum):
    """What the first lane of the search does."""

    IDLE = auto()
    DUE = auto()  # the timer runs until the moment of the round at which it begins
    ASKING = auto()  # an answer is awaited, or the record of one that an answer named
    RESTING = auto()  # the timer runs until it asks again
    WAITING = auto()  # there is nobody else to ask until the lane beside it ends


class PartnerSearch:
    """Finds the partner of each round and agrees with it when the round ends."""

    def __init__(
        self,
        me: PeerId,
        inner_steps: int,
        window: float,
        rng: random.Random,
        now: float,
        fragments: int = 1,
    ) -> None:
        """`fragments` is how many a replica has, each round being of one of them."""
        self._rng = rng
        self.pairing = Pairing(me, inner_steps, window, rng, fragments)
        self.accepting = True
        self.closed_with: set[PeerId] = set()  # partners that had finished, of rounds after the last step
        self.search_seconds: float | None = None  # of this round: from the first proposal to the yes
        # Mutable state besides: the clock of steps and rounds, the search, the last pair of each kind.
        self._tempo = Tempo(now)
        self._turns = Turns()
        self._steps = 0  # inner steps of this round
        self._round_trip = 0.0  # as the driver reported it last
        self.phase = Phase.IDLE
        self._under_way: dict[Lane, Proposal] = {}  # not answered yet, or its answer named one to hear about
        self._pause = BUSY_SECONDS
        self._sought_since: float | None = None
        self._known: Pair | None = None  # the last pair that was reported by `Agreed`
        self._told: Pair | None = None  # the last pair whose partner knows that this round ends
        self._wants_last = False  # a partner for a round after the last step
        self._awaits_ready: Pair | None = None  # that round's: the partner has not answered yet

    def __repr__(self) -> str:
        asking = ", ".join(
            f"{lane.name.lower()} {one.pair.partner[-8:]}" for lane, one in self._under_way.items()
        )
        return f"<PartnerSearch, {self.phase.name.lower()}, asks: {asking or 'nobody'}, {self.pairing}>"

    # --- what the driver may look at ----------------------------------------------------------

    @property
    def pair(self) -> Pair | None:
        """The pair agreed on for this round."""
        agreement = self.pairing.current
        return agreement.pair if agreement is not None else None

    @property
    def partner_trains(self) -> bool:
        """True if the partner of this round still takes inner steps, as far as it has said."""
        agreement = self.pairing.current
        return agreement is not None and agreement.partner_step > 0

    @property
    def has_agreed(self) -> bool:
        """True if there is a partner, for this round or the next."""
        return bool(self.pairing.agreements)

    @property
    def next_fragment(self) -> int | None:
        """The fragment of a round alone, see `FragmentOrder.next`."""
        return self.pairing.fragments.next

    @property
    def step_count(self) -> int:
        """Inner steps of this round, as last reported."""
        return self._steps

    def must_end(self, now: float) -> bool:
        """Return whether the end of this inner step is the end of the round."""
        return self.pairing.must_end(self._here(now))

    def partner_by(self, now: float) -> float:
        """See `Pairing.partner_by`."""
        return self.pairing.partner_by(self._here(now))

    def round_seconds(self, now: float) -> float:
        """Seconds that a round of the nominal number of inner steps takes."""
        return self.pairing.bounds.nominal * self._here(now).step_seconds

    def holds(self, pair: Pair) -> bool:
        """Return whether the pair is agreed on, for this round or the next."""
        return self.pairing.holds(pair)

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event in at `now`, in seconds of the driver's clock; return what is to be done, in this order.

        An exception leaves the search idle at worst: the next event of the round begins it again.
        """
        match event:
            case StepsCounted(steps):
                self._steps = steps
                return []
            case StepDone(seconds):
                self._tempo.step_done(seconds, now)
                return []
            case StepJudged():
                return self._step_judged(event, now)
            case TimerFired():
                return self._timer_fired(now)
            case Looked():
                return self._looked(event, now)
            case ProposalAnswered(proposal, answer):
                return self._answered(proposal, answer, now)
            case ProposalLost(proposal):
                return self._lost(proposal, now)
            case RecordArrived(proposal):
                lane = self._take(proposal)
                return self._go_on(lane, now) if lane is not None else []
            case Proposed(pair, theirs, asker):
                return self._proposed(pair, theirs, asker, now)
            case PartnerReady(pair):
                return [Reply(None if self.pairing.on_ready(pair) else Refusal("unknown-pair"))]
            case PartnerReleased(pair):
                return self._seek_when_due(now) if self.pairing.drop(pair) else []
            case AskedToSitOut(theirs, serves_other_stage):
                return [Reply(self._sits_out(theirs, serves_other_stage, now))]
            case ReadyAnswered(pair, is_known):
                return self._ready_answered(pair, is_known, now)
            case RoundEnded():
                return self._round_ended(now)
            case RoundBegan(inner_steps):
                return self._round_began(inner_steps, now)
            case LastSearchBegan():
                self.pairing.at_once = self._wants_last = True
                return [*self._stop_if_due(), *self._seek_last()]
            case LastSearchStopped():
                self._wants_last, self._awaits_ready = False, None
                return []
            case PairsDropped():
                return self._drop_pairs()
            case Retired():
                self.accepting = False
                return [*self._stop_if_due(), *self._drop_pairs()]
        assert_never(event)

    # --- the rhythm of a round ----------------------------------------------------------------

    def _here(self, now: float) -> RoundProgress:
        return self._tempo.progress(now, self._steps)

    def _is_stalled(self, now: float) -> bool:
        """Return whether it should step and does not; after the last step of a run it need not."""
        return not self.pairing.at_once and self._tempo.is_stalled(now, self.pairing.bounds)

    def _step_judged(self, event: StepJudged, now: float) -> list[Action]:
        here, pair, pairing = self._here(now), self.pair, self.pairing
        self._round_trip = event.round_trip
        if event.is_behind:
            return []
        actions = self._seek_when_due(now)
        if pair is not None and pairing.is_ready(here):
            actions += self._tell_ready()
        # a partner that has done with the pair when it is asked would take it for a new one
        if pairing.must_renew(here, event.in_doubt) and not pairing.must_end(here):
            renewal = pairing.renewal(here)
            if renewal is not None and Lane.RENEWAL not in self._under_way:
                actions.append(self._ask(Lane.RENEWAL, renewal))
        return actions

    def _tell_ready(self) -> list[Action]:
        """Tell the partner of this round, once, that it is about to end."""
        pair = self.pair
        if pair is None or pair == self._told:
            return []
        self._told = pair
        return [SendReady(pair)]

    def _round_ended(self, now: float) -> list[Action]:
        """A proposal that is not answered yet is withdrawn once it is."""
        self._tempo.round_ended(now)
        self.pairing.end_round(self._here(now))
        pair = self.pair
        if pair is not None and self.pairing.at_once and not self.partner_trains:
            self.closed_with.add(pair.partner)
        return self._tell_ready()

    def _round_began(self, inner_steps: int, now: float) -> list[Action]:
        self._tempo.round_began(now)
        self.search_seconds = self._sought_since = None
        self.pairing.pause = self._tempo.pause
        self.pairing.begin_round(inner_steps)
        return [*self._report_agreement(), *self._seek_when_due(now)]

    def _report_agreement(self) -> list[Action]:
        pair = self.pair
        if pair is None or pair == self._known:
            return []
        self._known = pair
        self._turns.taken(pair.partner)
        return [Agreed(pair)]

    def _drop_pairs(self) -> list[Action]:
        pairs = [agreement.pair for agreement in self.pairing.agreements]
        for pair in pairs:
            self.pairing.drop(pair)
        return [SendRelease(pair) for pair in pairs]

    # --- asking others ------------------------------------------------------------------------

    def _seek_when_due(self, now: float) -> list[Action]:
        """Begin to look for a partner at the moment that this round's dice chose."""
        if self.phase is not Phase.IDLE or self.pair is not None:
            return []
        if not self._tempo.is_known or not self.accepting:
            return []
        self.phase = Phase.DUE
        return [SetTimer(self.pairing.seeks_in(self._here(now)))]

    def _stop_if_due(self) -> list[Action]:
        if self.phase is not Phase.DUE:
            return []
        self.phase = Phase.IDLE
        return [StopTimer()]

    def _timer_fired(self, now: float) -> list[Action]:
        match self.phase:
            case Phase.DUE:
                self.phase = Phase.IDLE
                return [] if self._is_stalled(now) else self._begin()
            case Phase.RESTING:
                self.phase = Phase.IDLE
                return self._look_or_end()
            case _:
                return []

    def _begin(self) -> list[Action]:
        self._pause = BUSY_SECONDS
        return self._look_or_end()

    def _look_or_end(self) -> list[Action]:
        return [LookAround(Lane.FIRST)] if self.accepting else self._end()

    def _end(self) -> list[Action]:
        """End the search for this time: nobody is left to ask, or a partner is found."""
        self.phase = Phase.IDLE
        return self._seek_last()

    def _looked(self, event: Looked, now: float) -> list[Action]:
        """Ask the next replica of a lane, if there is one; in the first lane, let another be asked beside it."""
        if event.lane in self._under_way or not self.accepting:
            return []
        proposal, actions = self._next_proposal(event, now)
        is_first = event.lane is Lane.FIRST
        if proposal is None:
            return [*actions, *(self._found_nobody(now) if is_first else self._beside_ended())]
        self._sought_since = proposal.sent_at if self._sought_since is None else self._sought_since
        actions = [self._ask(event.lane, proposal), *actions]
        if is_first and self.pairing.may_ask_another and Lane.BESIDE not in self._under_way:
            actions.append(LookAround(Lane.BESIDE))
        return actions

    def _next_proposal(self, event: Looked, now: float) -> tuple[Proposal | None, list[Action]]:
        """Return whom to ask next, if anybody, and who is asked to sit out, as a list of actions."""
        self._round_trip = event.round_trip
        unwanted = self._turns.crowded(event.shares) | self.closed_with
        willing = [peer for peer in event.willing if peer not in unwanted] if unwanted else event.willing
        candidates = thinned(willing, event.shares.group_of.get, self._rng)
        proposal = self.pairing.propose(candidates, self._here(now), event.through_others)
        successor = self.pairing.successor(self._here(now))
        return proposal, [] if successor is None else [SendSitOut(*successor)]

    def _found_nobody(self, now: float) -> list[Action]:
        """There is nobody to ask at present: wait for the lane beside, rest, or end the search."""
        pairing = self.pairing
        if pairing.is_asking and Lane.BESIDE in self._under_way:
            self.phase = Phase.WAITING
            return []
        if pairing.current is not None or pairing.is_ending or not pairing.at_once:
            return self._end()
        pairing.forget_refusals()
        self._pause = min(2 * self._pause, max(BUSY_SECONDS, self._here(now).step_seconds))
        return self._rest()

    def _rest(self) -> list[Action]:
        self.phase = Phase.RESTING
        return [SetTimer(self._pause * self._rng.uniform(0.5, 1.5))]

    def _beside_ended(self) -> list[Action]:
        if self.phase is not Phase.WAITING:
            return []
        self.phase = Phase.IDLE
        return self._look_or_end()

    def _ask(self, lane: Lane, proposal: Proposal) -> SendProposal:
        self._put(lane, proposal)
        self.pairing.handshake = self._round_trip
        return SendProposal(proposal)

    def _put(self, lane: Lane, proposal: Proposal) -> None:
        """Keep the lane busy until the proposal is answered, or the record of one that an answer named has come."""
        self._under_way[lane] = proposal
        if lane is Lane.FIRST:
            self.phase = Phase.ASKING

    def _take(self, proposal: Proposal) -> Lane | None:
        """Free the lane that the proposal keeps busy, and return it; None if it keeps none."""
        lane = next((lane for lane, asked in self._under_way.items() if asked == proposal), None)
        if lane is not None:
            del self._under_way[lane]
            self.phase = Phase.IDLE if lane is Lane.FIRST else self.phase
        return lane

    # --- what they answer ---------------------------------------------------------------------

    def _lost(self, proposal: Proposal, now: float) -> list[Action]:
        pair = proposal.pair
        return [Suspect(pair.partner), SendRelease(pair), *self._answered(proposal, Refusal("lost"), now)]

    def _answered(self, proposal: Proposal, answer: Meeting | Refusal, now: float) -> list[Action]:
        lane = self._take(proposal)
        if lane is None:
            return []
        if isinstance(answer, Refusal):
            return self._refused(lane, proposal, answer, now)
        actions: list[Action] = []
        if not self.pairing.accepted(proposal, answer, self._here(now)):
            actions.append(SendRelease(proposal.pair))
        elif lane is not Lane.RENEWAL and self.search_seconds is None and self._sought_since is not None:
            self.search_seconds = now - self._sought_since
        return [*actions, *self._report_agreement(), *self._go_on(lane, now)]

    def _refused(self, lane: Lane, proposal: Proposal, refusal: Refusal, now: float) -> list[Action]:
        self.pairing.refused(proposal, refusal, self._here(now))
        if refusal.seeker is not None and self.pairing.wants(refusal.seeker):
            self._put(lane, proposal)
            return [AskForRecord(proposal, refusal.seeker)]
        return self._go_on(lane, now, is_busy=refusal.code == "busy")

    def _go_on(self, lane: Lane, now: float, is_busy: bool = False) -> list[Action]:
        """Go on in a lane whose proposal has been answered."""
        match lane:
            case Lane.RENEWAL:
                return self._seek_when_due(now)
            case Lane.BESIDE:
                return self._beside_ended() if is_busy or not self.accepting else [LookAround(lane)]
            case Lane.FIRST:
                return self._rest() if is_busy else self._look_or_end()
        assert_never(lane)

    # --- what others ask ----------------------------------------------------------------------

    def _proposed(self, pair: Pair, theirs: Meeting, asker: Asker, now: float) -> list[Action]:
        refusal = self._objection(pair, asker)
        if refusal is not None:
            return [Reply(refusal)]
        if self._is_stalled(now) and not self.pairing.is_ending:
            self.pairing.drop(pair)
            return [Reply(Refusal("early"))]
        answer = self.pairing.on_proposal(pair, theirs, self._here(now))
        # it may have been a pair of this replica's that is dropped now
        return [*self._seek_when_due(now), *self._report_agreement(), Reply(answer)]

    def _objection(self, pair: Pair, asker: Asker) -> Refusal | None:
        """Return why this replica averages with nobody, or not with this one, whatever it proposes."""
        if not self.accepting:
            return Refusal("finished")
        if asker.serves_other_stage:
            return Refusal("other-stage")
        if asker.is_quarantined:
            return Refusal("unwanted", why="contributions of this replica were out of all proportion")
        if asker.has_other_version:
            return Refusal("other-version", why="contributions of its version do not fit this one's")
        if asker.has_other_lineage:
            why = "its weights come from another beginning than this replica's"
            return Refusal("other-lineage", why=why)
        if asker.must_wait:
            return Refusal("early")
        crowded = self._turns.crowded(asker.shares) if asker.shares is not None else ()
        if pair.partner in crowded and not self.pairing.holds(pair):
            return Refusal("unwanted", why="many replicas of one network averaged here lately")
        return None

    def _sits_out(self, theirs: Meeting, serves_other_stage: bool, now: float) -> Refusal | None:
        if serves_other_stage or self._is_stalled(now):
            return Refusal("other-stage")
        return None if self.pairing.on_sit_out(theirs, self._here(now)) else Refusal("engaged")

    # --- after the last step ------------------------------------------------------------------

    def _seek_last(self) -> list[Action]:
        """Search until there is a partner for a round after the last step, and it knows that the round ends.

        None is looked for where one is agreed on for the next round: it may be waiting there.
        """
        if not self._wants_last or self._awaits_ready is not None:
            return []
        if telling := self._tell_ready():
            self._awaits_ready = self._told
            return telling
        if self.accepting and not self.has_agreed and not self.pairing.is_ending:
            is_searching = self.phase not in (Phase.IDLE, Phase.DUE)
            return [] if is_searching else [*self._stop_if_due(), *self._begin()]
        self._wants_last = False
        return [LastSearchEnded()]

    def _ready_answered(self, pair: Pair, is_known: bool, now: float) -> list[Action]:
        actions: list[Action] = []
        if not is_known and not self.pairing.is_ending and self.pairing.drop(pair):
            actions = self._seek_when_due(now)
        if pair == self._awaits_ready:
            self._awaits_ready = None
            actions += self._seek_last()
        return actions
