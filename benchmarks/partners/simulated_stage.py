"""Thousands of rounds of one stage's replicas in seconds: `Pairing` itself, with messages and inner steps as events.

What `node.rounds.matchmaker` does over the network, this does with delays drawn at random: the same calls in the same
order, no weights and no tensors. Replicas start at random moments, so nothing is in step unless pairing makes it so.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any, Literal

from node.rounds.meeting import Meeting, Pair, Proposal, Refusal, RoundProgress
from node.rounds.pace import steps_of_round
from node.rounds.pairing import Pairing
from protocol.ground import PeerId

BUSY_SECONDS = 0.02  # as in node.rounds.partner_search
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
    """One replica's steps, proposals and exchanges. Mutable state: its round and what it waits for."""

    def __init__(self, swarm: SimulatedStage, number: int, speed: float) -> None:
        setting = swarm.setting
        self.swarm, self.number, self.speed = swarm, number, speed
        self.peer = PeerId(f"replica {number:04}")
        self.rng = random.Random(f"{setting.seed}/{number}")
        self.pairing = Pairing(self.peer, setting.inner_steps, setting.window, self.rng)
        self.pairing.handshake = 2 * setting.latency[1]
        self.step_seconds = setting.step_seconds / speed
        self.was_alone = False
        self.seeks_since: float | None = None  # when it first proposed in this round
        self.seeking = False
        self.exchanging: Pair | None = None
        self.arrived: set[str] = set()  # the partner's contribution, and its word that ours has arrived
        swarm.at(self.rng.uniform(0, self.step_seconds * setting.inner_steps), self.join)

    def join(self) -> None:
        self.swarm.peers.append(self.peer)
        self.begin_round()

    # --- the rhythm ---------------------------------------------------------------------------

    def begin_round(self) -> None:
        setting, now = self.swarm.setting, self.swarm.now
        others = self.swarm.replicas if setting.pace == "time" else []
        rates = [other.speed for other in others if other is not self]
        self.pairing.begin_round(steps_of_round(setting.pace, setting.inner_steps, self.speed, rates))
        usual, noise = setting.step_seconds / self.speed, setting.step_noise
        steps = (max(0.0, self.rng.gauss(usual, noise * usual)) for _ in range(self.pairing.bounds.ends_at))
        self.ends = list(accumulate(steps, initial=now))
        self.steps, self.seeks_since, self.exchanging = 0, None, None
        self.round = self.swarm.outcome.rounds[self.number]
        self._await_step()
        self._seek_when_due()

    def here(self) -> RoundProgress:
        now = self.swarm.now
        if self.exchanging is not None or self.pairing.is_ending:
            return RoundProgress(now, self.steps, self.step_seconds)
        steps = bisect_right(self.ends, now) - 1
        return RoundProgress(now, steps, self.step_seconds, now - self.ends[steps])

    def _await_step(self) -> None:
        """Wake at the next end of a step at which something may be decided."""
        following = self.steps + 1
        if self.pairing.current is not None:
            following = max(following, self.pairing.bounds.nominal // 2)
        self.swarm.at(self.ends[following], self.step_done, self.round, following)

    def step_done(self, round_: int, steps: int) -> None:
        if self.swarm.outcome.rounds[self.number] != round_ or self.pairing.is_ending:
            return
        self.steps, here = steps, self.here()
        if self.pairing.must_end(here):
            self.end_round(here)
            return
        self._seek_when_due()
        agreement = self.pairing.current
        if agreement is not None and self.pairing.is_ready(here):
            self._tell_ready(agreement.pair)
        renewal = self.pairing.renewal(here) if self.pairing.must_renew(here, in_doubt=False) else None
        if renewal is not None:
            self._ask(renewal)
        self._await_step()

    # --- looking for a partner ----------------------------------------------------------------

    def _seek_when_due(self) -> None:
        delay = self.pairing.seeks_in(self.here())
        if self.pairing.current is None and not self.seeking and not self.pairing.is_asking:
            self.seeking = True
            self.swarm.at(self.swarm.now + delay, self.seek)

    def seek(self) -> None:
        self.seeking = False
        proposal = self.pairing.propose(self.swarm.peers, self.here())
        self._name_successor()
        if proposal is not None:
            self.seeks_since = self.swarm.now if self.seeks_since is None else self.seeks_since
            self._ask(proposal)
            self.seek()

    def _ask(self, proposal: Proposal) -> None:
        other = self.swarm.by_peer[proposal.pair.partner]

        def asked() -> None:
            pair, before = Pair(self.peer, proposal.pair.name), other.pairing.current
            answer = other.pairing.on_proposal(pair, proposal.mine, other.here())
            if before is None and other.pairing.current is not None and other.seeks_since is not None:
                self.swarm.outcome.agreed_after.append(self.swarm.now - other.seeks_since)  # it looked, too
            self.swarm.send(self.answered, proposal, answer)

        self.swarm.send(asked)

    def answered(self, proposal: Proposal, answer: Meeting | Refusal) -> None:
        renewed = self.pairing.holds(proposal.pair)
        if isinstance(answer, Refusal):
            self.pairing.refused(proposal, answer, self.here())
        elif not self.pairing.accepted(proposal, answer, self.here()):
            other = self.swarm.by_peer[proposal.pair.partner]
            self.swarm.outcome.released += 1
            self.swarm.send(other.released, Pair(self.peer, proposal.pair.name))
        elif not renewed and self.seeks_since is not None:
            self.swarm.outcome.agreed_after.append(self.swarm.now - self.seeks_since)
        if renewed:
            return
        if isinstance(answer, Refusal) and answer.code == "busy":
            self.seeking = True
            self.swarm.at(self.swarm.now + BUSY_SECONDS * self.rng.uniform(0.5, 1.5), self.seek)
        else:
            self.seek()

    def released(self, pair: Pair) -> None:
        self.pairing.drop(pair)
        self._seek_when_due()

    def _name_successor(self) -> None:
        successor = self.pairing.successor(self.here())
        if successor is not None:
            other = self.swarm.by_peer[successor[0]]
            self.swarm.send(lambda: other.pairing.on_sit_out(successor[1], other.here()))

    # --- ending the round ---------------------------------------------------------------------

    def _tell_ready(self, pair: Pair) -> None:
        other = self.swarm.by_peer[pair.partner]
        self.swarm.send(other.pairing.on_ready, Pair(self.peer, pair.name))

    def end_round(self, here: RoundProgress) -> None:
        self.ended_at, agreement = here.now, self.pairing.current
        self.step_seconds = (here.now - self.ends[0]) / here.steps
        self.pairing.end_round(RoundProgress(here.now, here.steps, self.step_seconds))
        if agreement is None:
            self.finish(None)
            return
        self.exchanging = agreement.pair
        self._tell_ready(agreement.pair)
        self.swarm.send(self.swarm.by_peer[agreement.pair.partner].contribution, self, agreement.pair.name)
        self.swarm.at(here.now + EXCHANGE_SECONDS, self.give_up, agreement.pair)

    def contribution(self, sender: SimulatedReplica, name: str) -> None:
        if not self.pairing.holds(Pair(sender.peer, name)):
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
            self.finish(None)

    def finish(self, pair: Pair | None) -> None:
        outcome, now = self.swarm.outcome, self.swarm.now
        bounds = self.pairing.bounds
        if pair is None:
            window = self.ends[bounds.opens_at], self.ends[bounds.ends_at]
            outcome.alone.append(AloneRound(self.number, self.was_alone, *window))
        elif self.peer < pair.partner:
            outcome.pairs[self.number, self.swarm.by_peer[pair.partner].number] += 1
        self.was_alone = pair is None
        outcome.rounds[self.number] += 1
        outcome.inner_steps[self.number] += self.steps
        outcome.blocked[self.number] += now - self.ended_at
        self.pairing.pause = 0.9 * self.pairing.pause + 0.1 * (now - self.ended_at)
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
