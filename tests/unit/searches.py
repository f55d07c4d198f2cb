"""One machine of `PartnerSearch` by hand: what it hears, what it wants done."""

from __future__ import annotations

import random
from collections.abc import Sequence

from node.membership.ledger import fair_shares
from node.rounds.meeting import LONGEST, Meeting, Pair, Proposal
from node.rounds.partner_search import PartnerSearch
from node.rounds.search_events import (
    Action,
    Event,
    Lane,
    Looked,
    ProposalAnswered,
    Proposed,
    RoundBegan,
    RoundEnded,
    SendProposal,
    StepDone,
    StepJudged,
    StepsCounted,
    TimerFired,
)
from protocol.ground import PeerId

ME, A, B, C = (PeerId(name) for name in ("me", "a", "b", "c"))
CROWD = [PeerId(f"one of many {number}") for number in range(12)]
K = 12
AT_ANY_TIME = Meeting(0.0, 0.0, LONGEST, 0.0)
IN_STEP = Meeting(K - 4.0, K - 1.0, K + 2.0, 1.0)  # with a replica that has done one step


class Search:
    """A machine with its clock; inner steps of a second. It knows nobody but those that a look shows it."""

    def __init__(self, seed: int = 0, k: int = K) -> None:
        self.now, self.steps = 0.0, 0
        self.machine = PartnerSearch(ME, k, 0.25, random.Random(seed), self.now)

    def hears(self, event: Event) -> list[Action]:
        return self.machine.handle(event, self.now)

    def steps_on(self, count: int = 1, **judged: bool) -> list[Action]:
        """What it wants done after the last of these steps."""
        actions: list[Action] = []
        for _ in range(count):
            self.now, self.steps = self.now + 1.0, self.steps + 1
            self.machine.handle(StepsCounted(self.steps), self.now)
            self.machine.handle(StepDone(1.0), self.now)
            actions = self.machine.handle(StepJudged(**judged, round_trip=0.1), self.now)
        return actions

    def sees(self, *peers: PeerId, lane: Lane = Lane.FIRST) -> list[Action]:
        return self.hears(Looked(lane, peers, fair_shares(peers, lambda peer: peer), 0.1))

    def seeks(self) -> list[Action]:
        """What it wants done when it begins to search after its first step."""
        self.steps_on()
        return self.hears(TimerFired())

    def asks(self, *peers: PeerId, lane: Lane = Lane.FIRST) -> Proposal:
        return proposal_in(self.sees(*peers, lane=lane))

    def agrees(self, partner: PeerId = A, theirs: Meeting = IN_STEP) -> Pair:
        """A pair with the partner that it asks, for this round."""
        self.seeks()
        proposal = self.asks(partner)
        self.hears(ProposalAnswered(proposal, theirs))
        self.sees(partner)
        assert self.machine.pair == proposal.pair
        return proposal.pair

    def next_round(self) -> list[Action]:
        """What it wants done when its round, which is over, is followed by the next one."""
        self.hears(RoundEnded())
        self.steps = 0
        self.hears(StepsCounted(0))
        return self.hears(RoundBegan(K))

    def is_asked(self, proposer: PeerId = A, theirs: Meeting = AT_ANY_TIME) -> list[Action]:
        return self.hears(Proposed(Pair(proposer, "theirs"), theirs))


def proposals_in(actions: Sequence[Action]) -> list[Proposal]:
    return [action.proposal for action in actions if isinstance(action, SendProposal)]


def proposal_in(actions: Sequence[Action]) -> Proposal:
    [proposal] = proposals_in(actions)
    return proposal
