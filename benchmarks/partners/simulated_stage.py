"""Thousands of rounds of one stage's replicas in seconds: `PartnerSearch` itself, messages and steps as events.

What `node.rounds.matchmaker` does over the network, this does with delays drawn at random: the same machine, no
weights and no tensors. Replicas start at random moments, so nothing is in step unless pairing makes it so.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any, Literal

from node.membership.ledger import fair_shares
from node.rounds.meeting import Meeting, Pair, Proposal, Refusal
from node.rounds.pace import steps_of_round
from node.rounds.partner_search import PartnerSearch
from node.rounds.search_events import (
    Agreed,
    AskedToSitOut,
    AskForRecord,
    Event,
    LookAround,
    Looked,
    PartnerReady,
    PartnerReleased,
    ProposalAnswered,
    Proposed,
    ReadyAnswered,
    RecordArrived,
    Reply,
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
    TimerFired,
)
from protocol.ground import PeerId

EXCHANGE_SECONDS = 5.0  # its deadline, as in node.rounds.exchanges


@dataclass(frozen=True)
class PairingSetting:
    """One swarm. Times in seconds; speeds are the replicas' relative to one that takes `step_seconds`."""

    speeds: Sequence[float]
    inner_steps: int = 25
    window: float = 0.25
    step_seconds: float = 0.5
    step_noise: float = 0.03  # standard deviation of a step's time, relative
    latency: tuple[float, float] = (0.02, 0.08)  # one way, uniform
    pace: Literal["steps", "time"] = "steps"
    seed: int = 0

    @property
    def round_trip(self) -> float:
        """Of the mean latencies."""
        return sum(self.latency)


@dataclass(frozen=True)
class AloneRound:
    """A round that ended without a partner; whether the one before did, too; when it could have ended."""

    replica: int
    again: bool
    opens: float
    ends: float


@dataclass
class PairingResult:
    """What was seen. Mutable while the simulation runs."""

    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    alone: list[AloneRound] = field(default_factory=list)
    agreed_after: list[float] = field(default_factory=list)  # seconds from one's first proposal in the round
    rounds: Counter[int] = field(default_factory=Counter)
    inner_steps: Counter[int] = field(default_factory=Counter)
    # seconds from the last inner step of a round to the beginning of the next one, by replica
    blocked: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    one_sided: int = 0  # rounds that ended alone although a pair had been agreed on
    overdue: int = 0  # of these, rounds whose exchange took its deadline
    seconds: float = 0.0
    released: int = 0  # second ones of two that agreed

    def alone_twice_in_vain(self) -> int:
        """How often a replica was alone twice in a row while another, that it could have met, was alone too."""
        return sum(
            any(
                other.replica != lone.replica and other.opens <= lone.ends and lone.opens <= other.ends
                for other in self.alone
            )
            for lone in self.alone
            if lone.again
        )

    def alone_fraction(self) -> float:
        return len(self.alone) / max(1, self.rounds.total())

    def median_seconds_to_agree(self) -> float:
        return median(self.agreed_after)

    def late_seconds_to_agree(self) -> float:
        """What 19 of 20 searches stay below."""
        return sorted(self.agreed_after)[int(0.95 * len(self.agreed_after))]

    def blocked_fraction(self, replica: int) -> float:
        return self.blocked[replica] / self.seconds


class SimulatedReplica:
    """One replica's steps, its search for partners and exchanges. Mutable state: its round and what it waits for."""

    def __init__(self, swarm: SimulatedStage, number: int, speed: float) -> None:
        setting = swarm.setting
        self.swarm, self.number, self.speed = swarm, number, speed
        self.peer = PeerId(f"replica {number:04}")
        self.rng = random.Random(f"{setting.seed}/{number}")
        self.search = PartnerSearch(self.peer, setting.inner_steps, setting.window, self.rng, swarm.now)
        self.timers = 0  # set so far; the last one counts
        self.was_alone = False
        self.seeks_since: float | None = None  # when it first proposed in this round
        self.exchanging: Pair | None = None
        self.arrived: set[str] = set()  # the partner's contribution, and its word that ours has arrived
        swarm.at(self.rng.uniform(0, setting.step_seconds / speed * setting.inner_steps), self.join)

    def join(self) -> None:
        self.swarm.peers.append(self.peer)
        self.swarm.shares = fair_shares(self.swarm.peers, lambda peer: peer)
        self.begin_round()

    # --- driving the search -------------------------------------------------------------------

    def handle(self, event: Event) -> Meeting | Refusal | None:
        """Hand the event to the search and do what it asks for; return its answer to another replica's request."""
        swarm, answer = self.swarm, None
        for action in self.search.handle(event, swarm.now):
            match action:
                case SendProposal(proposal):
                    self._ask(proposal)
                case SendReady(pair):
                    swarm.send(swarm.by_peer[pair.partner].on_ready, Pair(self.peer, pair.name))
                case SendRelease(pair):
                    swarm.outcome.released += 1
                    released = PartnerReleased(Pair(self.peer, pair.name))
                    swarm.send(swarm.by_peer[pair.partner].handle, released)
                case SendSitOut(named, meeting):
                    swarm.send(swarm.by_peer[named].handle, AskedToSitOut(meeting))
                case AskForRecord(proposal):  # it is known already
                    self.handle(RecordArrived(proposal))
                case SetTimer(seconds):
                    self.timers += 1
                    swarm.at(swarm.now + seconds, self._timer_fired, self.timers)
                case StopTimer():
                    self.timers += 1
                case LookAround(lane):
                    handshake = 2 * swarm.setting.latency[1]
                    self.handle(Looked(lane, swarm.peers, swarm.shares, handshake))
                case Reply(reply):
                    answer = reply
                case Agreed():
                    pass
                case _:
                    raise AssertionError(f"{action} is not for a stage whose replicas all answer")
        return answer

    def _timer_fired(self, number: int) -> None:
        if number == self.timers:
            self.handle(TimerFired())

    def _ask(self, proposal: Proposal) -> None:
        swarm, other = self.swarm, self.swarm.by_peer[proposal.pair.partner]
        if proposal.pair != self.search.pair and self.seeks_since is None:
            self.seeks_since = swarm.now

        def asked() -> None:
            before = other.search.pair
            answer = other.handle(Proposed(Pair(self.peer, proposal.pair.name), proposal.mine))
            if before is None and other.search.pair is not None:
                other.note_search()  # it looked, too
            swarm.send(self.answered, proposal, answer)

        swarm.send(asked)

    def answered(self, proposal: Proposal, answer: Meeting | Refusal) -> None:
        was_held = self.search.holds(proposal.pair)
        self.handle(ProposalAnswered(proposal, answer))
        if not was_held and self.search.holds(proposal.pair):
            self.note_search()

    def note_search(self) -> None:
        if self.seeks_since is not None:
            self.swarm.outcome.agreed_after.append(self.swarm.now - self.seeks_since)

    def on_ready(self, pair: Pair) -> None:
        if self.handle(PartnerReady(pair)) is not None:
            other = self.swarm.by_peer[pair.partner]
            self.swarm.send(other.handle, ReadyAnswered(Pair(self.peer, pair.name), is_known=False))

    # --- the rhythm ---------------------------------------------------------------------------

    def begin_round(self) -> None:
        setting, now = self.swarm.setting, self.swarm.now
        others = self.swarm.replicas if setting.pace == "time" else []
        rates = [other.speed for other in others if other is not self]
        self.steps, self.seeks_since, self.exchanging = 0, None, None
        self.handle(StepsCounted(0))
        self.handle(RoundBegan(steps_of_round(setting.pace, setting.inner_steps, self.speed, rates)))
        usual, noise = setting.step_seconds / self.speed, setting.step_noise
        bounds = self.search.pairing.bounds
        steps = (max(0.0, self.rng.gauss(usual, noise * usual)) for _ in range(bounds.ends_at))
        self.ends = list(accumulate(steps, initial=now))
        self.swarm.at(self.ends[1], self.step_done)

    def step_done(self) -> None:
        self.steps += 1
        took = self.ends[self.steps] - self.ends[self.steps - 1]
        round_trip = self.swarm.setting.round_trip
        for event in (StepsCounted(self.steps), StepDone(took), StepJudged(round_trip=round_trip)):
            self.handle(event)
        if self.search.must_end(self.swarm.now):
            self.end_round()
        else:
            self.swarm.at(self.ends[self.steps + 1], self.step_done)

    # --- ending the round ---------------------------------------------------------------------

    def end_round(self) -> None:
        swarm, pair = self.swarm, self.search.pair
        self.ended_at = swarm.now
        self.handle(RoundEnded())
        if pair is None:
            self.finish(None)
            return
        self.exchanging = pair
        swarm.send(swarm.by_peer[pair.partner].contribution, self, pair.name)
        swarm.at(swarm.now + EXCHANGE_SECONDS, self.give_up, pair)

    def contribution(self, sender: SimulatedReplica, name: str) -> None:
        if not self.search.holds(Pair(sender.peer, name)):
            self.swarm.send(sender.give_up, Pair(self.peer, name))
            return
        self.arrived.add(name)
        self.swarm.send(sender.acknowledged, Pair(self.peer, name))
        self._finish_exchange()

    def acknowledged(self, pair: Pair) -> None:
        self.arrived.add(f"ours of {pair.name}")
        self._finish_exchange()

    def _finish_exchange(self) -> None:
        pair = self.exchanging
        if pair is not None and {pair.name, f"ours of {pair.name}"} <= self.arrived:
            self.finish(pair)

    def give_up(self, pair: Pair) -> None:
        if self.exchanging == pair:
            self.swarm.outcome.one_sided += 1
            self.swarm.outcome.overdue += self.swarm.now - self.ended_at >= EXCHANGE_SECONDS
            self.finish(None)

    def finish(self, pair: Pair | None) -> None:
        outcome, now = self.swarm.outcome, self.swarm.now
        bounds = self.search.pairing.bounds
        if pair is None:
            window = self.ends[bounds.opens_at], self.ends[bounds.ends_at]
            outcome.alone.append(AloneRound(self.number, self.was_alone, *window))
        elif self.peer < pair.partner:
            outcome.pairs[self.number, self.swarm.by_peer[pair.partner].number] += 1
        self.was_alone = pair is None
        outcome.rounds[self.number] += 1
        outcome.inner_steps[self.number] += self.steps
        outcome.blocked[self.number] += now - self.ended_at
        if pair is not None:  # what came for the next round already stays
            self.arrived -= {pair.name, f"ours of {pair.name}"}
        self.begin_round()


class SimulatedStage:
    """All replicas of a stage and the events to come. Run it once."""

    def __init__(self, setting: PairingSetting) -> None:
        self.setting = setting
        self.now = 0.0
        self.outcome = PairingResult()
        self._rng = random.Random(f"{setting.seed}/network")
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._counted = 0
        self.replicas: list[SimulatedReplica] = []
        for number, speed in enumerate(setting.speeds):
            self.replicas.append(SimulatedReplica(self, number, speed))
        self.by_peer = {replica.peer: replica for replica in self.replicas}
        self.peers: list[PeerId] = []  # those who have joined
        self.shares = fair_shares([], lambda peer: peer)  # of them, each a network of its own

    def at(self, time: float, action: Callable[..., Any], *arguments: Any) -> None:
        self._counted += 1
        heapq.heappush(self._events, (time, self._counted, action, arguments))

    def send(self, action: Callable[..., Any], *arguments: Any) -> None:
        """The receiver acts once the message has arrived."""
        self.at(self.now + self._rng.uniform(*self.setting.latency), action, *arguments)

    def run(self, rounds: int) -> PairingResult:
        """Until every replica has ended that many rounds."""
        events, counted = self._events, self.outcome.rounds
        while True:
            for _ in range(1_000):
                self.now, _, action, arguments = heapq.heappop(events)
                action(*arguments)
            if all(counted[replica.number] >= rounds for replica in self.replicas):
                self.outcome.seconds = self.now
                return self.outcome
