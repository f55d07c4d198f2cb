"""Rounds of a simulated peer: what `node.rounds.matchmaker` does over the network, with messages as events.

Who averages with whom and when a round ends is decided by the daemon's `Pairing`, `Tempo` and `Turns`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from bootstrap.simulated_swarm.disagreement import Opinion
from bootstrap.simulated_swarm.modelled_dht import RECORD_BYTES
from bootstrap.simulated_swarm.modelled_network import MESSAGE
from node.links.trip_times import TripTimes
from node.membership.turns import Turns
from node.membership.view import Member
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal, RoundProgress
from node.rounds.pace import Tempo
from node.rounds.pairing import Pairing
from node.rounds.partner_search import BUSY_SECONDS

if TYPE_CHECKING:
    from bootstrap.simulated_swarm.swarm_peer import SwarmPeer


class Partnering:
    """Finds partners and ends rounds for a simulated peer.

    Mutable state: the pairing, the tempo, the exchange under way, and how long answers take.
    """

    def __init__(self, peer: SwarmPeer, opinion: Opinion, rng: random.Random) -> None:
        run = peer.world.scenario.run
        self._peer = peer
        self._world = peer.world
        self._rng = rng
        self._inner_steps = run.inner_steps
        self.pairing = Pairing(peer.peer, run.inner_steps, run.window, rng)
        self.opinion = opinion
        self._tempo = Tempo(self._world.now)
        self._turns = Turns()
        self._times = TripTimes()
        self.steps = 0  # inner steps of this round
        self.rounds = 0
        self._seeks = False  # before long
        self._seeks_since: float | None = None
        # by the names of pairs; in the second those refused with the name of another one, whose record is asked for:
        self._asked: dict[str, Proposal] = {}
        self._hears_about: dict[str, Proposal] = {}
        self._renewing: Proposal | None = None  # asked whether the pair still holds
        self._known: Pair | None = None
        self._told: Pair | None = None
        self._last_partner = ""
        self._exchanging: Pair | None = None
        self._came: dict[str, Any] = {}  # contributions by the name of the pair
        self._taken: dict[str, None] = {}  # pairs whose partner has ours

    # --- the rhythm ---------------------------------------------------------------------------

    def here(self) -> RoundProgress:
        return self._tempo.progress(self._world.now, self.steps)

    def step_done(self, seconds: float) -> bool:
        """Note that an inner step ended; return whether the round ends with it."""
        self.steps += 1
        self._tempo.step_done(seconds, self._world.now)
        here, pairing = self.here(), self.pairing
        self._seek_when_due()
        agreement = pairing.current
        if agreement is not None and self._told != agreement.pair and pairing.is_ready(here):
            self._tell_ready(agreement.pair)
        in_doubt = agreement is not None and self._is_in_doubt(agreement.pair.partner)
        if pairing.must_renew(here, in_doubt) and not pairing.must_end(here) and self._renewing is None:
            self._renewing = pairing.renewal(here)
            if self._renewing is not None:
                self._ask(self._renewing)
        return pairing.must_end(here)

    def _is_in_doubt(self, partner: str) -> bool:
        peer, now = self._peer, self._world.now
        return peer.view.knows(partner) and partner not in peer.view.serving(peer.stage, now)  # type: ignore[arg-type]

    def _begin_round(self) -> None:
        self.steps, self._seeks_since, self._exchanging = 0, None, None
        self._tempo.round_began(self._world.now)
        self.pairing.pause = self._tempo.pause
        self.pairing.begin_round(self._inner_steps)
        self._note_agreement()
        self._came = {name: z for name, z in self._came.items() if self._is_expected(name)}
        self._taken.clear()
        self._seek_when_due()

    def _is_expected(self, name: str) -> bool:
        return any(agreement.pair.name == name for agreement in self.pairing.agreements)

    # --- looking for a partner ----------------------------------------------------------------

    def _seek_when_due(self) -> None:
        is_seeking = self._seeks or self.pairing.is_asking or bool(self._hears_about)
        if is_seeking or self.pairing.current is not None or not self._tempo.is_known:
            return
        self._seeks = True
        self._world.queue.after(self.pairing.seeks_in(self.here()), self._start_seeking)

    def _start_seeking(self) -> None:
        self._seeks = False
        if self._is_here() and not self._tempo.is_stalled(self._world.now, self.pairing.bounds):
            self._seek()

    def _is_here(self) -> bool:
        return self._peer.serves and self._peer.partnering is self

    def _seek(self) -> None:
        self._seeks = False
        while self._is_here() and (proposal := self._next_proposal()) is not None:
            self._seeks_since = self._world.now if self._seeks_since is None else self._seeks_since
            self._world.measures.proposed(self._peer.stage, proposal.pair.partner)
            self._ask(proposal)

    def _next_proposal(self) -> Proposal | None:
        peer, world = self._peer, self._world
        serving = peer.view.serving(peer.stage, world.now)
        crowded = self._turns.crowded(peer.shares(serving))
        candidates = [other for other in serving if other not in crowded] if crowded else serving
        proposal = self.pairing.propose(peer.view.thinned(candidates, self._rng), self.here())
        successor = self.pairing.successor(self.here())
        if successor is not None:
            other = world.peers[successor[0]]
            world.network.send(peer, other, "pairing", MESSAGE, other.on_sit_out, peer.stage, successor[1])
        return proposal

    def _ask(self, proposal: Proposal) -> None:
        world, peer = self._world, self._peer
        self._asked[proposal.pair.name] = proposal
        self.pairing.handshake = self._times.round_trip
        other = world.peers[proposal.pair.partner]
        if not other.view.knows(peer.peer):
            world.measures.sent(peer, other, "discovery", RECORD_BYTES)  # goes ahead on the same stream
        world.network.send(
            peer, other, "pairing", MESSAGE, other.on_propose, peer, proposal, peer.stage, self
        )
        world.queue.after(self._times.deadline_of(other.peer), self._lost, proposal)

    def on_propose(self, asker: SwarmPeer, proposal: Proposal) -> Meeting | Refusal:
        pair, here = Pair(asker.peer, proposal.pair.name), self.here()
        stalled = self._tempo.is_stalled(self._world.now, self.pairing.bounds)
        if stalled and not self.pairing.is_ending:
            self.pairing.drop(pair)
            return Refusal("early")
        answer = self.pairing.on_proposal(pair, proposal.mine, here)
        self._seek_when_due()
        self._note_agreement()
        return answer

    def released(self, pair: Pair) -> None:
        if self.pairing.drop(pair):
            self._seek_when_due()

    def answered(self, proposal: Proposal, answer: Meeting | Refusal) -> None:
        if self._asked.get(proposal.pair.name) is not proposal:
            return
        self._times.answered(proposal.pair.partner, self._world.now - proposal.sent_at)
        self._conclude(proposal, answer)

    def _lost(self, proposal: Proposal) -> None:
        if self._asked.get(proposal.pair.name) is not proposal or not self._is_here():
            return
        self._times.missed(proposal.pair.partner)
        self._peer.view.suspect(proposal.pair.partner)
        self._release(proposal.pair)
        self._conclude(proposal, Refusal("lost"))

    def _conclude(self, proposal: Proposal, answer: Meeting | Refusal) -> None:
        del self._asked[proposal.pair.name]
        renewed = proposal is self._renewing
        self._renewing = None if renewed else self._renewing
        if isinstance(answer, Refusal):
            self.pairing.refused(proposal, answer, self.here())
        elif not self.pairing.accepted(proposal, answer, self.here()):
            self._release(proposal.pair)
        elif not renewed and self._seeks_since is not None:
            self._note_search(self._seeks_since)
        self._note_agreement()
        if not renewed and isinstance(answer, Refusal) and self._asks_about(proposal, answer):
            return
        self._go_on(proposal, answer, renewed)

    def _asks_about(self, proposal: Proposal, refusal: Refusal) -> bool:
        """Ask for the record of one that the other has told of, where that is worth it; return whether it is."""
        world, peer, named = self._world, self._peer, refusal.seeker
        if named is None or not self.pairing.wants(named) or peer.view.knows(named):
            return False
        self._hears_about[proposal.pair.name] = proposal
        other, asked = world.peers[proposal.pair.partner], (peer, named, self, proposal)
        world.network.send(peer, other, "discovery", MESSAGE, other.on_get_record, *asked)
        world.queue.after(self._times.deadline_of(other.peer), self.heard_about, proposal, None)
        return True

    def heard_about(self, asked: Proposal, record: Member | None) -> None:
        """Go on with the search, with that record if it came."""
        if self._hears_about.pop(asked.pair.name, None) is None:
            return
        if record is not None and record.announcement.stage == self._peer.stage:
            self._peer.view.take([record])
        if self._is_here():
            self._seek()

    def _go_on(self, proposal: Proposal, answer: Meeting | Refusal, renewed: bool) -> None:
        if renewed:
            self._seek_when_due()
        elif isinstance(answer, Refusal) and answer.code == "busy":
            self._seeks = True
            self._world.queue.after(BUSY_SECONDS * self._rng.uniform(0.5, 1.5), self._seek)
        else:
            self._seek()

    def _note_search(self, since: float) -> None:
        """Note how long a search took, unless it began in the warm-up: of those only the long ones end after it."""
        world, measures = self._world, self._world.measures
        if measures.counts and since >= measures.warm_up:
            measures.pairing_trips.append((world.now - since) / world.network.round_trip)

    def _note_agreement(self) -> None:
        agreement = self.pairing.current
        if agreement is not None and agreement.pair != self._known:
            self._known = agreement.pair
            self._turns.taken(agreement.pair.partner)

    def _tell_ready(self, pair: Pair) -> None:
        self._told = pair
        self._tell(pair, "on_ready")

    def _release(self, pair: Pair) -> None:
        self._tell(pair, "on_release")

    def _tell(self, pair: Pair, what: str) -> None:
        other = self._world.peers[pair.partner]
        mine = Pair(self._peer.peer, pair.name)
        self._world.network.send(self._peer, other, "pairing", MESSAGE, getattr(other, what), mine)

    def let_go(self) -> None:
        """Release the agreed partners: this peer leaves its stage in good order."""
        for agreement in self.pairing.agreements:
            self.pairing.drop(agreement.pair)
            self._release(agreement.pair)

    # --- the end of a round -------------------------------------------------------------------

    @property
    def has_partner(self) -> bool:
        return self.pairing.current is not None

    def finish(self) -> None:
        """End the round; `SwarmPeer.round_over` is called when its outer step is done."""
        world, peer, agreement = self._world, self._peer, self.pairing.current
        self._tempo.round_ended(world.now)
        self.pairing.end_round(self.here())
        if agreement is None:
            self._finished(None)
            return
        pair = self._exchanging = agreement.pair
        if self._told != pair:
            self._tell_ready(pair)
        other, run = world.peers[pair.partner], world.scenario.run
        z = self.opinion.contribution()
        mine = Pair(peer.peer, pair.name)
        world.network.send(peer, other, "rounds", run.state_bytes, other.on_contribution, peer, mine, z)
        world.queue.after(self.pairing.partner_by(self.here()) + run.gossip_deadline, self.give_up, pair)

    def contributed(self, pair: Pair, z: Any) -> bool:
        """Take the partner's contribution; return whether it was expected."""
        if not self.pairing.holds(pair):
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
        self.rounds += 1
        replicas = world.serving[self._peer.stage]
        world.measures.round_ended(world.now, pair is None, replicas % 2 == 1)
        if pair is not None:
            world.measures.partner_met(pair.partner == self._last_partner, 1 / max(1, replicas - 1))
            self._last_partner = pair.partner
        world.measures.log(world.now, "round", self._peer.peer, "" if pair is None else pair.partner)
        self._begin_round()
        self._peer.round_over()
