"""Has the next stage compute a microbatch: asks one peer, and another one when that fails or takes long."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from node.context import Context
from node.pipeline.checks import Checks
from node.pipeline.conduct import Conduct
from node.pipeline.gradient_screen import CONTENT
from node.pipeline.late_answers import Asking, Late, LateAnswers
from node.pipeline.microbatch import Microbatch
from node.pipeline.next_stage import NextStage
from protocol.codecs.codec import Encoded
from protocol.errors import DeadlineExceeded, PeerUnreachable, Refused, TransportDown, WireError
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.supervision import seen

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05  # before asking again peers that were all busy, doubling up to the next line
MOST_RETRY_SECONDS = 0.8
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
MOST_ASKED = 3  # peers that have one microbatch at once
ENOUGH_REFUSALS = 2  # peers that refuse a microbatch for its content: it is the content


@dataclass
class _Sending:
    """A microbatch on its way to the next stage, and what became of it so far. Times are `View.elapsed`."""

    microbatch: Microbatch
    parcel: list[Encoded]
    due: float  # when a peer is asked, perhaps beside others
    waiting_since: float  # for a peer that takes it
    pause: float = RETRY_SECONDS
    tried: set[PeerId] = field(default_factory=set)
    # of peers that refuse its content, or whose answer this node refuses, and when they were asked
    refusals: dict[PeerId, tuple[Refused, float]] = field(default_factory=dict)
    asked: dict[PeerId, tuple[Asking, float]] = field(default_factory=dict)  # under way, and since when

    @property
    def askings(self) -> Iterable[Asking]:
        return [asking for asking, _ in self.asked.values()]

    def note_progress(self, peer: PeerId, progress: Progress) -> None:
        """Note that the microbatch gets on, by the word of the peer that was asked last."""
        if next(reversed(self.asked), None) == peer:
            self.microbatch.note_onward(progress)


class StageClient:
    """Sends microbatches to peers of the next stage and tries another peer when one fails or takes long."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self._next = NextStage(context, rng)
        self._conduct = Conduct(context, self._next.stage)
        self._checks = Checks(context, context.random())
        self._late = LateAnswers(context, self._conduct)
        self._tasks = context.supervisor.group()
        self._leaving = False

    def prepare_to_leave(self) -> None:
        """Send what others can still take; do not wait for peers that may never come."""
        self._leaving = True

    async def send(self, microbatch: Microbatch, parcel: list[Encoded]) -> tuple[float, torch.Tensor]:
        """Send to random peers of the next stage until one answers; returns its loss and the gradient.

        The parcel has activations and labels. Each failure costs one resend to another peer. When an answer takes far
        longer than usual, another peer is asked as well and the first answer counts. With no live peer this waits for
        one to appear. Raises `Refused` when two peers, or the only one, refuse it for its content or give
        gradients for it that are out of all proportion.
        """
        now = self._context.view.elapsed()
        sending = _Sending(microbatch, parcel, now, now)
        try:
            while True:
                await self._ask_when_due(sending)
                for peer in await self._ended(sending):
                    asking, asked = sending.asked.pop(peer)
                    answer = await self._outcome(sending, peer, asking, asked)
                    if answer is not None:
                        self._accept(sending, peer, asked, answer[1])
                        return answer
        finally:
            for asking in sending.askings:
                asking.cancel()
                asking.add_done_callback(seen)

    async def _ask_when_due(self, sending: _Sending) -> None:
        """Ask a peer if it is time, beside those that are asked. Without a peer, wait a while if nobody is asked."""
        view, following = self._context.view, self._next
        now = view.elapsed()
        if now < sending.due:
            return
        peers = self._conduct.usable()
        out = sending.tried | sending.refusals.keys() | sending.asked.keys()
        if sending.asked and not following.times.is_known:  # all may still compile, or be as slow
            out |= set(following.holders)
        peer = await following.choose(peers, out, sending.microbatch.origin, now - sending.waiting_since)
        if peer is None:
            if not sending.asked:
                if sending.refusals and sending.refusals.keys() >= set(peers):
                    raise next(iter(sending.refusals.values()))[0]
                await self._wait_for_peers(sending.pause if peers else None)
            sending.due = view.elapsed() + (sending.pause if sending.asked else 0.0)
            # doubled, since each try carries the whole activations
            sending.pause = min(MOST_RETRY_SECONDS, 2 * sending.pause)
            sending.tried.clear()
            return
        has_others = bool(set(peers) - sending.tried - {peer})
        sending.microbatch.mark_onward()
        asking = self._tasks.start(
            following.ask(
                peer,
                sending.microbatch,
                sending.parcel,
                has_others,
                lambda progress: sending.note_progress(peer, progress),
            ),
            "asking a peer",
        )
        sending.asked[peer] = asking, view.elapsed()
        is_last = len(sending.asked) >= MOST_ASKED
        sending.due = math.inf if is_last else view.elapsed() + following.times.second_after()

    async def _ended(self, sending: _Sending) -> list[PeerId]:
        """Wait until requests have ended or another peer is to be asked; returns the peers whose requests ended."""
        if not sending.asked:
            return []
        left = max(0.0, sending.due - self._context.view.elapsed())
        done, _ = await asyncio.wait(
            sending.askings,
            timeout=None if math.isinf(left) else left,
            return_when=asyncio.FIRST_COMPLETED,
        )
        return [peer for peer, (asking, _) in sending.asked.items() if asking in done]

    async def _outcome(
        self, sending: _Sending, peer: PeerId, asking: Asking, asked: float
    ) -> tuple[float, torch.Tensor] | None:
        """Return the answer of a request that has ended; None after a failure, and another peer is asked at once."""
        sending.due = self._context.view.elapsed()
        try:
            return asking.result()
        except Refused as refusal:
            logger.debug("Peer %s refused a microbatch: %s", peer[-8:], refusal)
            sending.tried.add(peer)
            if refusal.code in CONTENT:
                sending.refusals[peer] = refusal, asked
                if len(sending.refusals) >= ENOUGH_REFUSALS:
                    raise
        except (PeerUnreachable, DeadlineExceeded, WireError) as failure:
            self._next.note_failure(peer, failure)
            self._conduct.record_failure(peer, failure, asked)
            self._context.counters.resends += 1
            sending.tried.add(peer)
            sending.waiting_since = sending.due
        except TransportDown as problem:
            if self._leaving:
                raise
            logger.debug("Waiting for the network: %s", problem)
            await asyncio.sleep(PAUSE_SECONDS)
        return None

    def _accept(self, sending: _Sending, peer: PeerId, asked: float, gradient: torch.Tensor) -> None:
        """Record the first answer and who refused what it shows to be sound; other peers asked may finish."""
        took = self._context.view.elapsed() - asked
        for other, (asking, since) in sending.asked.items():
            self._late.let_finish(asking, Late(other, since, took, self._next.times.second_after()))
        sending.asked.clear()
        self._conduct.record_good(peer)
        for overruled, (refusal, since) in sending.refusals.items():
            self._conduct.record_overruled(overruled, refusal, since)
        if self._next.is_random:
            self._check(sending, peer, gradient)

    def _check(self, sending: _Sending, peer: PeerId, gradient: torch.Tensor) -> None:
        """Perhaps have other peers compute the microbatch, too, and compare their answers."""
        peers = self._conduct.usable()
        microbatch, parcel = sending.microbatch, sending.parcel

        async def ask(other: PeerId) -> torch.Tensor:
            _, answer = await self._next.ask(other, microbatch, parcel, others=True)
            return answer

        self._checks.consider(peer, gradient, peers, lambda: self._next.is_full(peer, peers), ask)

    async def _wait_for_peers(self, pause: float | None) -> None:
        """Wait `pause` seconds for busy peers; with None there are no live ones, which the volunteer is told."""
        if pause is None:
            if self._leaving:
                raise TransportDown("this node is leaving and nobody can take its microbatches")
            self._conduct.record_nobody()
        await asyncio.sleep(PAUSE_SECONDS if pause is None else pause)
