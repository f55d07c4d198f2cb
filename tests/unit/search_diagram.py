"""Draws the phases of `PartnerSearch` from what it does: `python tests/unit/search_diagram.py` prints the diagram.

A machine hears thousands of random events; each change of its phase is an arrow, named by the events that made it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable
from enum import Enum

from node.membership.ledger import fair_shares
from node.rounds.meeting import LONGEST, Meeting, Pair, Proposal, Refusal
from node.rounds.partner_search import PartnerSearch, Phase
from node.rounds.search_events import (
    AskForRecord,
    Event,
    LastSearchBegan,
    LastSearchStopped,
    LookAround,
    Looked,
    PartnerReleased,
    ProposalAnswered,
    ProposalLost,
    Proposed,
    ReadyAnswered,
    RecordArrived,
    RoundBegan,
    RoundEnded,
    SendProposal,
    SendReady,
    StepDone,
    StepJudged,
    StepsCounted,
    TimerFired,
)
from protocol.ground import PeerId

K, LIVES, EVENTS = 8, 150, 250
OTHERS = [PeerId(f"other {number}") for number in range(12)]
Arrows = dict[tuple[Phase, Phase], set[str]]


class Life:
    """The life of one machine among others that answer at random. Mutable: all that it does."""

    def __init__(self, seed: int, arrows: Arrows) -> None:
        self._dice = random.Random(seed)
        self._arrows = arrows
        self._now, self._steps = 0.0, 0
        self._machine = PartnerSearch(PeerId("me"), K, 0.25, random.Random(seed), 0.0)
        self._open: list[Event] = []  # events that may follow from what it has asked for
        self._known = self._dice.choice([OTHERS[:3], OTHERS])

    def hear(self, event: Event) -> None:
        before = self._machine.phase
        self._carry_out(event)
        if self._machine.phase is not before:
            self._arrows[before, self._machine.phase].add(type(event).__name__)

    def _carry_out(self, event: Event) -> None:
        for action in self._machine.handle(event, self._now):
            match action:
                case LookAround(lane):
                    known = self._dice.choice([self._known, self._known, self._known, []])
                    self._carry_out(Looked(lane, known, fair_shares(known, lambda peer: peer), 0.01))
                case SendProposal(proposal):
                    self._open.append(self._answer(proposal))
                case AskForRecord(proposal, _):
                    self._open.append(RecordArrived(proposal))
                case SendReady(pair):
                    self._open.append(ReadyAnswered(pair, self._dice.random() < 0.5))

    def _answer(self, proposal: Proposal) -> Event:
        names = self._dice.sample(OTHERS, 2)
        refusals = [Refusal("engaged", *names), Refusal("engaged"), Refusal("busy"), Refusal("early")]
        answer = self._dice.choice([Meeting(0.0, 0.0, LONGEST, 0.0), *refusals, None])
        return ProposalLost(proposal) if answer is None else ProposalAnswered(proposal, answer)

    def go_on(self) -> None:
        """Let something happen."""
        dice, machine = self._dice, self._machine
        self._now += dice.choice([0.01, 0.1, 1.0, 30.0 if dice.random() < 0.05 else 0.5])
        if self._open and dice.random() < 0.4:
            self.hear(self._open.pop(dice.randrange(len(self._open))))
        elif machine.phase in (Phase.DUE, Phase.RESTING) and dice.random() < 0.4:
            self.hear(TimerFired())
        elif dice.random() < 0.1:
            self.hear(Proposed(Pair(dice.choice(OTHERS), str(self._now)), Meeting(0.0, 0.0, LONGEST, 0.0)))
        elif machine.pair is not None and dice.random() < 0.2:
            self.hear(PartnerReleased(machine.pair))
        elif dice.random() < 0.02:
            ends: list[Event] = [LastSearchBegan(), LastSearchStopped()]
            self.hear(dice.choice(ends))
        elif self._steps < K:
            self._steps += 1
            self._hear_all(StepsCounted(self._steps), StepDone(1.0), StepJudged())
        else:
            self._steps = 0
            self._hear_all(RoundEnded(), StepsCounted(0), RoundBegan(K))

    def _hear_all(self, *events: Event) -> None:
        for event in events:
            self.hear(event)


def arrows() -> Arrows:
    """Each change of phase that was seen, with the events that made it."""
    found: Arrows = defaultdict(set)
    for seed in range(LIVES):
        life = Life(seed, found)
        for _ in range(EVENTS):
            life.go_on()
    return found


def diagram() -> str:
    return drawn(arrows().items(), Phase.IDLE)


def drawn(arrows: Iterable[tuple[tuple[Enum, Enum], Collection[str]]], first: Enum) -> str:
    """The diagram in Mermaid's language."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    for (before, after), events in sorted(arrows, key=lambda one: [p.value for p in one[0]]):
        lines.append(f"    {before.name} --> {after.name}: {', '.join(sorted(events))}")
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    print(diagram(), end="")
