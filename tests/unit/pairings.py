"""Replicas that pair by hand: what one proposes, what another answers, whom it ends up with."""

from __future__ import annotations

import random

from node.rounds.meeting import LONGEST, Meeting, Pair, Proposal, Refusal, RoundProgress
from node.rounds.pairing import FEW, Pairing
from protocol.ground import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")
CROWD = [PeerId(f"one of many {number}") for number in range(FEW + 1)]
ANY_TIME = Meeting(0.0, 0.0, LONGEST, 0.0)
K = 20


def pairing(me: PeerId = A, k: int = K, window: float = 0.25, seed: int = 1) -> Pairing:
    return Pairing(me, k, window, random.Random(f"{seed} {me}"))


def at(steps: int, now: float | None = None, step_seconds: float = 1.0) -> RoundProgress:
    return RoundProgress(steps * step_seconds if now is None else now, steps, step_seconds)


def propose(proposer: Pairing, *candidates: PeerId, steps: int = 0) -> Proposal:
    proposal = proposer.propose(candidates, at(steps))
    assert proposal is not None
    return proposal


def deliver(proposal: Proposal, proposer: Pairing, to: Pairing, steps: int = 0) -> Meeting | Refusal:
    return to.on_proposal(Pair(proposer.me, proposal.pair.name), proposal.mine, at(steps))


def answer(proposal: Proposal, proposer: Pairing, reply: Meeting | Refusal, steps: int = 0) -> bool:
    if isinstance(reply, Refusal):
        proposer.refused(proposal, reply, at(steps))
        return False
    return proposer.accepted(proposal, reply, at(steps))


def agreed(a: Pairing, b: Pairing, steps: int = 0) -> Pair:
    """As `a` sees it."""
    proposal = propose(a, b.me, steps=steps)
    assert answer(proposal, a, deliver(proposal, a, b, steps), steps)
    return proposal.pair


def partner(member: Pairing) -> PeerId | None:
    return member.current.pair.partner if member.current is not None else None


def next_round(member: Pairing, now: float = 0.0) -> None:
    member.end_round(RoundProgress(now, K, 1.0))
    member.begin_round(K)
