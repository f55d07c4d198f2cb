"""Has a second replica compute a random sample of microbatches, too, and finds out who is odd when answers disagree.

Two replicas that train are within each other's spread: the gradients that they give for the same activations had
cosines of 0.85 and more at every age of a small run, norms within 1.5 (coding in 2 bits costs 0.12 of the cosine).
A third one decides between two that disagree. Who is asked cannot tell a check from any other microbatch.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import torch

from node.context import Context
from node.membership.ledger import ALWAYS_WRONG, OFTEN_WRONG
from protocol.errors import NolocoError
from protocol.ground import PeerId

logger = logging.getLogger(__name__)

AGREEMENT = 0.5  # the least cosine of two answers that agree
RATIO = 2.0  # the most of their norms
JUDGES = 3  # peers of which one can be found odd
EAGER = 0.1  # of the microbatches of a peer that was wrong lately, or is quicker than it is believed to be
AT_ONCE = 2  # checks under way: each keeps its activations

Ask: TypeAlias = Callable[[PeerId], Awaitable[torch.Tensor]]


@dataclass(frozen=True)
class Comparison:
    agreeing: frozenset[PeerId]
    odd: PeerId | None = None


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two gradients by the same activations can be those of two replicas."""
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) for tensor in (one, other)]
    if min(norms) == 0.0:
        return max(norms) == 0.0
    product = float(torch.dot(one.flatten().float(), other.flatten().float()))
    return product >= AGREEMENT * norms[0] * norms[1] and max(norms) <= RATIO * min(norms)


def judged(answers: Mapping[PeerId, torch.Tensor]) -> Comparison:
    """Find the peers that agree with another; of `JUDGES`, the one that agrees with neither of two that do."""
    pairs = [pair for pair in combinations(answers, 2) if agree(answers[pair[0]], answers[pair[1]])]
    agreeing = frozenset(peer for pair in pairs for peer in pair)
    alone = answers.keys() - agreeing
    is_decided = len(answers) == JUDGES and len(alone) == 1
    return Comparison(agreeing, alone.pop() if is_decided else None)


class Checks:
    """Sends a random sample of microbatches to a second replica and compares the answers.

    What the checks find is in the ledger.
    """

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self._rng = rng
        self._running = 0
        self._tasks = context.supervisor.group()
        # an answer for an earlier stage is made with the help of later ones: these may be what is wrong
        next_is_last = context.stage + 1 == context.manifest.hops - 1
        self._most_wrong = OFTEN_WRONG if next_is_last else ALWAYS_WRONG

    def consider(
        self,
        peer: PeerId,
        gradient: torch.Tensor,
        peers: Sequence[PeerId],
        is_quick: Callable[[], bool],
        ask: Ask,
    ) -> None:
        """Check `gradient`, which `peer` gave: now and then `ask` others of the `peers` the same.

        `is_quick`: whether the peer got all that one gets whose work was not compared yet.
        """
        context = self._context
        rate = context.manifest.checked
        ledger = context.view.ledger
        if rate and (ledger.is_doubted(peer) or (not ledger.is_proven(peer) and is_quick())):
            rate = max(rate, EAGER)
        others = [other for other in peers if other != peer]
        if self._running >= AT_ONCE or len(peers) < JUDGES or self._rng.random() >= rate:
            return
        self._running += 1
        witnesses = self._rng.sample(others, JUDGES - 1)
        stops = "Whether that peer's work is right stays unknown."
        self._tasks.spawn(self._compare({peer: gradient}, witnesses, ask), "comparing answers", stops)

    async def _compare(
        self, answers: dict[PeerId, torch.Tensor], witnesses: Sequence[PeerId], ask: Ask
    ) -> None:
        try:
            for witness in witnesses:
                answers[witness] = await ask(witness)
                if judged(answers).agreeing:
                    break
            self._note(judged(answers))
        except NolocoError as problem:
            logger.debug("Answers were not compared: %s", problem)
        finally:
            self._running -= 1

    def _note(self, verdict: Comparison) -> None:
        context, ledger, now = self._context, self._context.view.ledger, self._context.view.elapsed()
        for peer in verdict.agreeing:
            ledger.record_check(peer, True, now, self._most_wrong)
        if verdict.odd is None:
            return
        if ledger.record_check(verdict.odd, False, now, self._most_wrong):
            context.events.warn(
                f"Peer {context.view.called(verdict.odd)} computes something else than the other replicas of its "
                "stage; it gets no microbatches from here for a while. If it is yours, remove its checkpoint and "
                "start it again.",
                "wrong-answers",
                peer=verdict.odd,
            )
