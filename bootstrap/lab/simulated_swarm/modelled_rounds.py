"""Rounds of a simulated peer: drives the daemon's `PartnerSearch` with messages as events, as `Matchmaker` does.

The exchange at the end of a round is modelled: its bytes travel, and a few numbers stand for the weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from bootstrap.lab.simulated_swarm.disagreement import Opinion
from bootstrap.lab.simulated_swarm.modelled_dht import RECORD_BYTES
from bootstrap.lab.simulated_swarm.modelled_network import MESSAGE, Host
from bootstrap.lab.simulated_swarm.swarm_space import SwarmSpace
from node.links.trip_times import TripTimes
from node.membership.ledger import Shares
from node.membership.view import Member, View
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from node.rounds.partner_search import PartnerSearch
from node.rounds.search_events import (
    AskedToSitOut,
    Asker,
    AskForRecord,
    Event,
    Lane,
    LookAround,
    Looked,
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


class AveragingPeer(Host, Protocol):
    """A peer that ends rounds with others of its stage, and what they ask of it."""

    peer: PeerId
    view: View
    stage: int
    serves: bool
    rounds: ModelledRounds | None
    record: Member | None  # its own

    @property
    def world(self) -> SwarmSpace[AveragingPeer]: ...

    def shares(self, peers: Sequence[PeerId]) -> Shares: ...
    def round_over(self) -> None: ...
    def on_propose(
        self, asker: AveragingPeer, proposal: Proposal, stage: int, theirs: ModelledRounds
    ) -> None: ...
    def on_get_record(
        self, asker: AveragingPeer, named: PeerId, theirs: ModelledRounds, asked: Proposal
    ) -> None: ...
    def on_sit_out(self, stage: int, meeting: Meeting) -> None: ...
    def on_contribution(self, sender: AveragingPeer, pair: Pair, z: Any) -> None: ...


class ModelledRounds:
    """Finds partners and ends rounds for a simulated peer while it serves a stage."""

    def __init__(self, peer: AveragingPeer, opinion: Opinion, rng: random.Random) -> None:
        run = peer.world.scenario.run
        self._peer = peer
        self._world = peer.world
        self._inner_steps = run.inner_steps
        self.search = PartnerSearch(peer.peer, run.inner_steps, run.window, rng, peer.world.now)
        self.opinion = opinion
        self._times = TripTimes()
        # Mutable state besides: the answers that it waits for, and the exchange under way.
        self._timers = 0  # set so far; the last one counts
        self._asked: dict[str, Proposal] = {}  # by the names of pairs
        self._steps = 0  # inner steps of this round
        self._seeks_since: float | None = None  # when it first proposed in this round
        self._last_partner = ""
        self._exchanging: Pair | None = None
        self._came: dict[str, Any] = {}  # contributions by the name of the pair
        self._taken: dict[str, None] = {}  # pairs whose partner has ours

    # --- driving the search -------------------------------------------------------------------

    def _is_here(self) -> bool:
        return self._peer.serves and self._peer.rounds is self

    def _handle(self, event: Event) -> Meeting | Refusal | None:
        """Hand the event to the search and do what it asks for. Return its answer to another peer's request."""
        peer, world, answer = self._peer, self._world, None
        for action in self.search.handle(event, world.now):
            match action:
                case SendProposal(proposal):
                    self._ask(proposal)
                case SendReady(pair):
                    self._tell(pair, "on_ready")
                case SendRelease(pair):
                    self._tell(pair, "on_release")
                case SendSitOut(named, meeting):
                    other = world.peers[named]
                    world.network.send(peer, other, "pairing", MESSAGE, other.on_sit_out, peer.stage, meeting)
                case AskForRecord(proposal, named):
                    self._ask_for_record(proposal, named)
                case SetTimer(seconds):
                    self._timers += 1
                    world.queue.after(seconds, self._timer_fired, self._timers)
                case StopTimer():
                    self._timers += 1
                case Suspect(suspected):
                    peer.view.suspect(suspected)
                case LookAround(lane):
                    self._handle(self._look(lane))
                case Reply(reply):
                    answer = reply
        return answer

    def _timer_fired(self, number: int) -> None:
        if number == self._timers and self._is_here():
            self._handle(TimerFired())

    def _look(self, lane: Lane) -> Looked:
        serving = self._peer.view.serving(self._peer.stage, self._world.now)
        world, peer = self._world, self._peer
        through = {other for other in serving if world.network.goes_through_others(peer, world.peers[other])}
        return Looked(lane, serving, peer.shares(serving), self._times.round_trip, through)

    def _tell(self, pair: Pair, what: str) -> None:
        other = self._world.peers[pair.partner]
        mine = Pair(self._peer.peer, pair.name)
        self._world.network.send(self._peer, other, "pairing", MESSAGE, getattr(other, what), mine)

    def _ask(self, proposal: Proposal) -> None:
        world, peer = self._world, self._peer
        if proposal.pair != self.search.pair:
            self._seeks_since = world.now if self._seeks_since is None else self._seeks_since
            world.measures.proposed(peer.stage, proposal.pair.partner)
        self._asked[proposal.pair.name] = proposal
        other = world.peers[proposal.pair.partner]
        if not other.view.knows(peer.peer):
            world.measures.sent("discovery", RECORD_BYTES)  # goes ahead on the same stream
        world.network.send(
            peer, other, "pairing", MESSAGE, other.on_propose, peer, proposal, peer.stage, self
        )
        world.queue.after(self._times.deadline_of(other.peer), self._lost, proposal)

    def answered(self, proposal: Proposal, answer: Meeting | Refusal) -> None:
        if not self._is_awaited(proposal):
            return
        self._times.answered(proposal.pair.partner, self._world.now - proposal.sent_at)
        was_held = self.search.holds(proposal.pair)
        self._handle(ProposalAnswered(proposal, answer))
        if not was_held and self.search.holds(proposal.pair):
            self._note_search()

    def _lost(self, proposal: Proposal) -> None:
        if self._is_awaited(proposal):
            self._times.missed(proposal.pair.partner)
            self._handle(ProposalLost(proposal))

    def _is_awaited(self, proposal: Proposal) -> bool:
        """Return whether an answer to the proposal is awaited still; none is after this."""
        if self._asked.get(proposal.pair.name) is not proposal:
            return False
        del self._asked[proposal.pair.name]
        return self._is_here()

    def _note_search(self) -> None:
        """Note how long a search took, unless it began in the warm-up: of those only the long ones end after it."""
        world, measures, since = self._world, self._world.measures, self._seeks_since
        if measures.counts and since is not None and since >= measures.warm_up:
            measures.pairing_trips.append((world.now - since) / world.network.round_trip)

    def _ask_for_record(self, proposal: Proposal, named: PeerId) -> None:
        world, peer = self._world, self._peer
        if peer.view.knows(named):
            self.heard_about(proposal, None)
            return
        other = world.peers[proposal.pair.partner]
        world.network.send(
            peer, other, "discovery", MESSAGE, other.on_get_record, peer, named, self, proposal
        )
        world.queue.after(self._times.deadline_of(other.peer), self.heard_about, proposal, None)

    def heard_about(self, asked: Proposal, record: Member | None) -> None:
        """Go on with the search, with that record if it came."""
        if record is not None and record.announcement.stage == self._peer.stage:
            self._peer.view.take([record])
        if self._is_here():
            self._handle(RecordArrived(asked))

    # --- what others ask ----------------------------------------------------------------------

    def on_propose(self, asker: AveragingPeer, proposal: Proposal) -> Meeting | Refusal:
        """Answer as the daemon does. No peer is quarantined or behind: none lies, and none stands still."""
        peer = self._peer
        facts = Asker(shares=peer.shares(peer.view.serving(peer.stage, self._world.now)))
        answer = self._handle(Proposed(Pair(asker.peer, proposal.pair.name), proposal.mine, facts))
        assert answer is not None
        return answer

    def on_ready(self, pair: Pair) -> None:
        if self._handle(PartnerReady(pair)) is not None:
            self._tell(pair, "on_unknown_pair")

    def on_unknown_pair(self, pair: Pair) -> None:
        self._handle(ReadyAnswered(pair, is_known=False))

    def on_release(self, pair: Pair) -> None:
        self._handle(PartnerReleased(pair))

    def on_sit_out(self, meeting: Meeting) -> None:
        self._handle(AskedToSitOut(meeting))

    # --- the rhythm ---------------------------------------------------------------------------

    def step_done(self, seconds: float) -> bool:
        """Note that an inner step ended; return whether the round ends with it."""
        self._count_steps(self._steps + 1)
        self._handle(StepDone(seconds))
        pair = self.search.pair
        in_doubt = pair is not None and self._is_in_doubt(pair.partner)
        self._handle(StepJudged(in_doubt=in_doubt, round_trip=self._times.round_trip))
        return self.search.must_end(self._world.now)

    def _count_steps(self, steps: int) -> None:
        self._steps = steps
        self._handle(StepsCounted(steps))

    def _is_in_doubt(self, partner: PeerId) -> bool:
        peer, now = self._peer, self._world.now
        return peer.view.knows(partner) and partner not in peer.view.serving(peer.stage, now)

    def let_go(self) -> None:
        """Release the agreed partners: this peer leaves its stage in good order."""
        self._handle(Retired())

    # --- the end of a round -------------------------------------------------------------------

    @property
    def has_partner(self) -> bool:
        return self.search.pair is not None

    def finish(self) -> None:
        """End the round; `round_over` of the peer is called when its outer step is done."""
        world, peer, pair = self._world, self._peer, self.search.pair
        self._handle(RoundEnded())
        if pair is None:
            self._finished(None)
            return
        self._exchanging = pair
        other, run = world.peers[pair.partner], world.scenario.run
        z = self.opinion.contribution()
        mine = Pair(peer.peer, pair.name)
        world.network.send(peer, other, "rounds", run.state_bytes, other.on_contribution, peer, mine, z)
        deadline = self.search.partner_by(world.now) + run.gossip_deadline
        world.queue.after(deadline, self.give_up, pair)

    def contributed(self, pair: Pair, z: Any) -> bool:
        """Take the partner's contribution; return whether it was expected."""
        if not self.search.holds(pair):
            return False
        self._came[pair.name] = z
        self._finish_exchange()
        return True

    def acknowledged(self, name: str) -> None:
        self._taken[name] = None
        self._finish_exchange()

    def _finish_exchange(self) -> None:
        pair = self._exchanging
        if pair is not None and pair.name in self._came and pair.name in self._taken:
            self._finished(pair)

    def give_up(self, pair: Pair) -> None:
        if self._exchanging == pair and self._is_here():
            self._finished(None)

    def _finished(self, pair: Pair | None) -> None:
        world = self._world
        self._exchanging = None
        self.opinion.end_round(None if pair is None else self._came.pop(pair.name))
        replicas = world.serving[self._peer.stage]
        world.measures.round_ended(world.now, pair is None, replicas % 2 == 1)
        if pair is not None:
            chance = 1 / max(1, replicas - 1)
            world.measures.partner_met(
                self._peer.peer, pair.partner, pair.partner == self._last_partner, chance
            )
            self._last_partner = pair.partner
        world.measures.log(world.now, "round", self._peer.peer, "" if pair is None else pair.partner)
        self._begin_round()
        self._peer.round_over()

    def _begin_round(self) -> None:
        self._seeks_since = None
        self._count_steps(0)
        self._handle(RoundBegan(self._inner_steps))
        agreements = self.search.pairing.agreements
        expected = {agreement.pair.name for agreement in agreements}
        self._came = {name: z for name, z in self._came.items() if name in expected}
        self._taken.clear()
