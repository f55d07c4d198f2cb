"""Sends a microbatch to the next stage: one of two random live peers, and another one when that fails or takes long.

In a ring the stage after the last is the first one, and the peer that drew the sequences comes before random ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from node.context import Context
from node.links.links import AdaptiveDeadline
from node.pipeline.answer_times import AnswerTimes
from node.pipeline.checks import Checks
from node.pipeline.gradient_screen import CONTENT, GradientScreen
from node.pipeline.late_answers import Asking, Late, LateAnswers
from node.pipeline.microbatch import Microbatch, Origin
from node.pipeline.routing import FixedRouter, Router
from node.pipeline.two_choices import TwoChoices
from protocol.codec import Encoded
from protocol.errors import (
    DeadlineExceeded,
    NolocoError,
    OddGradient,
    OddLoss,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.messages.training import Forward, GetBacklog, Gradient, Return
from protocol.patience import Patience, ignore
from protocol.peer_limits import PeerTable
from protocol.supervision import all_of, seen

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05  # before asking again peers that were all busy, doubling up to the next line
MOST_RETRY_SECONDS = 0.8
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
LEAST_DEADLINE = 5.0  # of silence; three signs of life fit into it, and below it deadlines only cause resends
MOST_OVERRULED = 256  # peers that are remembered
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
    # for its content, or answers that this node refuses for it, and when they were asked for
    refusals: dict[PeerId, tuple[Refused, float]] = field(default_factory=dict)
    asked: dict[Asking, tuple[PeerId, float]] = field(default_factory=dict)  # under way: whom, and when


class StageClient:
    """Sends microbatches to peers of the next stage and tries another peer when one fails or takes long."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self._next = context.manifest.stage_after(context.stage)
        self._returns_to_origin = self._next == 0
        self._screen = GradientScreen(context)
        if context.manifest.routing == "fixed":
            self._router: Router = FixedRouter(rng, self._own_place)
        else:
            self._router = Router(rng, context.view.shares, context.view.ledger.is_proven)
        self._choices = TwoChoices(self._router, context.view.group_of)
        self._checks = Checks(context, context.random())
        limit = context.manifest.limits.microbatch_deadline
        self._deadline = AdaptiveDeadline(limit, LEAST_DEADLINE)
        self._times = AnswerTimes(limit, context.manifest.hops - 1 - context.stage)
        self._late = LateAnswers(context, self._next, self._screen.record_bad)
        self._tasks = context.supervisor.group()
        self._told = PeerTable[str](MOST_OVERRULED)  # how each failed, as it was told, until it answers again
        self._overruled = PeerTable[float](MOST_OVERRULED)  # when a refusal of theirs was last found wrong
        self._leaving = False

    def _own_place(self) -> int:
        """The place of this replica among those of its stage, by peer id."""
        context = self._context
        others = context.view.serving(context.stage, context.transport.now())
        return sum(peer < context.me for peer in others)

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
                for asking in await self._ended(sending):
                    peer, asked = sending.asked.pop(asking)
                    answer = await self._outcome(asking, peer, asked, sending)
                    if answer is not None:
                        self._take(sending, peer, asked, answer[1])
                        return answer
        finally:
            for asking in sending.asked:
                asking.cancel()
                asking.add_done_callback(seen)

    async def _ask_when_due(self, sending: _Sending) -> None:
        """Ask a peer if it is time, beside those that are asked. Without a peer, wait a while if nobody is asked."""
        context, now = self._context, self._context.view.elapsed()
        if now < sending.due:
            return
        peers = self._screen.usable(context.view.serving(self._next, context.transport.now()))
        out = sending.tried | sending.refusals.keys() | {peer for peer, _ in sending.asked.values()}
        if sending.asked and not self._times.is_known:  # all may still compile, or be as slow
            out |= set(self._choices.holders)
        peer = await self._choose(peers, out, sending.microbatch.origin, now - sending.waiting_since)
        if peer is None:
            if not sending.asked:
                if sending.refusals and sending.refusals.keys() >= set(peers):
                    raise next(iter(sending.refusals.values()))[0]
                await self._wait_for_peers(sending.pause if peers else None)
            sending.due = context.view.elapsed() + (sending.pause if sending.asked else 0.0)
            sending.pause = min(
                MOST_RETRY_SECONDS, 2 * sending.pause
            )  # each try carries the whole activations
            sending.tried.clear()
            return
        others = set(peers) - sending.tried - {peer}
        sending.microbatch.mark_onward()
        asking: Asking
        asking = self._tasks.start(
            self._ask(peer, sending.microbatch, sending.parcel, bool(others), lambda p: told(p)),
            "asking a peer",
        )

        def told(progress: Progress) -> None:
            if next(reversed(sending.asked), None) is asking:  # of the peer that was asked last
                sending.microbatch.note_onward(progress)

        sending.asked[asking] = peer, context.view.elapsed()
        is_last = len(sending.asked) >= MOST_ASKED
        sending.due = math.inf if is_last else context.view.elapsed() + self._times.second_after()

    async def _ended(self, sending: _Sending) -> list[Asking]:
        """Wait until requests have ended or another peer is to be asked; returns those that have ended."""
        if not sending.asked:
            return []
        left = max(0.0, sending.due - self._context.view.elapsed())
        done, _ = await asyncio.wait(
            sending.asked, timeout=None if math.isinf(left) else left, return_when=asyncio.FIRST_COMPLETED
        )
        return [asking for asking in sending.asked if asking in done]

    async def _outcome(
        self, asking: Asking, peer: PeerId, asked: float, sending: _Sending
    ) -> tuple[float, torch.Tensor] | None:
        """The answer of a request that has ended; None after a failure, and then another peer is asked at once."""
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
            self._note_failure(peer, failure, asked)
            sending.tried.add(peer)
            sending.waiting_since = sending.due
        except TransportDown as problem:
            if self._leaving:
                raise
            logger.debug("Waiting for the network: %s", problem)
            await asyncio.sleep(PAUSE_SECONDS)
        return None

    def _take(self, sending: _Sending, peer: PeerId, asked: float, gradient: torch.Tensor) -> None:
        """Take a peer's answer; whoever else has the microbatch may finish it."""
        now = self._context.view.elapsed()
        for asking, (other, since) in sending.asked.items():
            self._late.let_finish(asking, Late(other, since, now - asked, self._times.second_after()))
        sending.asked.clear()
        self._screen.record_good(peer)
        self._told.pop(peer, None)
        for overruled, (said, since) in sending.refusals.items():
            if said.code == OddLoss.CODE and not isinstance(said, OddGradient):
                continue  # of which each judges by what it has seen of this sender
            if since >= self._overruled.get(overruled, 0.0):  # what was under way together is one offence
                self._overruled[overruled] = now
                self._screen.record_bad(overruled)
        self._tell_served_again()
        peers = self._screen.usable(self._context.view.serving(self._next, self._context.transport.now()))
        self._compare(sending.microbatch, sending.parcel, peer, gradient, peers)

    def _compare(
        self,
        microbatch: Microbatch,
        parcel: list[Encoded],
        peer: PeerId,
        gradient: torch.Tensor,
        peers: list[PeerId],
    ) -> None:
        """Perhaps let others compute the microbatch, too; what returns, or goes to a fixed one, has no others."""
        if self._returns_to_origin or self._context.manifest.routing != "random":
            return

        async def ask(other: PeerId) -> torch.Tensor:
            _, answer = await self._ask(other, microbatch, parcel, others=True)
            return answer

        self._checks.consider(peer, gradient, peers, lambda: self._router.is_full(peer, peers), ask)

    async def _choose(
        self, peers: list[PeerId], exclude: set[PeerId], origin: Origin | None, waited: float
    ) -> PeerId | None:
        if self._returns_to_origin and origin is not None and origin.peer not in exclude:
            return origin.peer
        if self._returns_to_origin or self._context.manifest.routing != "random":
            return self._router.choose(peers, exclude, waited)
        candidates = self._choices.candidates(peers, exclude, waited)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        told: dict[PeerId, float] = {}
        if self._choices.asks:
            answers = zip(candidates, await all_of(*map(self._backlog, candidates)), strict=True)
            told = {peer: seconds for peer, seconds in answers if seconds is not None}
        return self._choices.chosen(candidates, told, self._context.view.elapsed())

    async def _backlog(self, peer: PeerId) -> float | None:
        """Seconds of work that the peer has; None if it takes no more or does not answer in a few round trips."""
        times, view = self._choices.times, self._context.view
        began, answer = view.elapsed(), None
        try:
            answer, _ = await self._context.rpc.call(
                peer, GetBacklog(stage=self._next), deadline=times.deadline_of(peer)
            )
        except DeadlineExceeded:
            times.missed(peer)
            return None
        except Refused:
            pass
        except NolocoError:  # whether it is gone shows when it is sent something
            return None
        times.answered(peer, view.elapsed() - began)
        return answer.seconds if answer is not None else None

    async def _ask(
        self,
        peer: PeerId,
        microbatch: Microbatch,
        parcel: list[Encoded],
        others: bool,
        note_progress: Callable[[Progress], None] = ignore,
    ) -> tuple[float, torch.Tensor]:
        """Ask one peer. With `others` to ask it has the silence that is usual, else all that the manifest allows:
        asked again over the same connection it would not be heard sooner.
        """
        context, times = self._context, self._times
        limit = context.manifest.limits.microbatch_deadline
        silence = self._deadline.seconds() if others else limit
        patience = Patience(silence, times.standstill, note_progress, times.at_most())
        began = context.view.elapsed()
        self._router.turns.taken(peer)
        self._choices.sent(peer, began)
        try:
            message: Forward | Return = self._message(microbatch)
            reply, gradient = await context.rpc.call(
                peer, message, parcel, deadline=patience, read=partial(self._screened, peer, parcel)
            )
        except BaseException:
            self._router.turns.given_back(peer)
            raise
        finally:
            self._choices.returned(peer, began)
        self._deadline.note(patience.longest_silence)
        seconds = context.view.elapsed() - began
        times.note(seconds)
        self._router.note(peer, seconds, reply.seconds * (1 + reply.queue))
        context.counters.sent.note(peer)
        if not self._returns_to_origin:
            context.ledger.note_tokens(peer, context.manifest.tokens_per_microbatch)
        if context.stage == 0:  # which nobody sends microbatches to, so that those who get them sign
            context.ledger.note_given(peer, context.manifest.tokens_per_microbatch)
        return reply.loss, gradient

    def _screened(
        self, peer: PeerId, parcel: list[Encoded], reply: Gradient, tensors: list[torch.Tensor]
    ) -> tuple[Gradient, torch.Tensor]:
        return reply, self._screen.checked(peer, parcel[1], tensors[0])

    def _message(self, microbatch: Microbatch) -> Forward | Return:
        origin, name = microbatch.origin, microbatch.onward_name
        peer, draw = (origin.peer, origin.draw) if origin is not None else ("", "")
        if self._returns_to_origin:
            return Return(microbatch=name, home=peer, draw=draw)
        return Forward(microbatch=name, stage=self._next, home=peer, draw=draw)

    def _note_failure(self, peer: PeerId, failure: NolocoError, asked: float) -> None:
        context = self._context
        if isinstance(failure, DeadlineExceeded):
            self._deadline.note_missed()
        if isinstance(failure, WireError):
            self._screen.record_bad(peer)
        else:
            context.view.suspect(peer, asked=asked)
        self._router.forget(peer)
        context.counters.resends += 1
        event = {"peer": peer, "reason": type(failure).__name__}
        if self._told.get(peer) == event["reason"]:  # said already: it is left alone when it goes on
            context.events.emit("resend", **event)
            return
        self._told[peer] = event["reason"]
        context.events.warn(
            f"Peer {peer[-8:]} of stage {self._next} {_what_happened(failure)}; "
            "its microbatch goes to another one.",
            "resend",
            **event,
        )

    async def _wait_for_peers(self, pause: float | None) -> None:
        """Wait `pause` seconds for busy peers; with None there are no live ones, which the volunteer is told."""
        if pause is not None:
            await asyncio.sleep(pause)
            return
        if self._leaving:
            raise TransportDown("this node is leaving and nobody can take its microbatches")
        context, stage = self._context, self._next
        if context.counters.no_peer_since is None:
            context.counters.no_peer_since = context.view.elapsed()
            context.events.warn(
                f"No live peer serves stage {stage} at present; waiting for one.", "no-peer", stage=stage
            )
        await asyncio.sleep(PAUSE_SECONDS)

    def _tell_served_again(self) -> None:
        """Take the warning back, once somebody has answered."""
        counters, stage = self._context.counters, self._next
        if counters.no_peer_since is not None:
            counters.no_peer_since = None
            self._context.events.say(f"Stage {stage} is served again.", "peer-again", stage=stage)


def _what_happened(failure: NolocoError) -> str:
    if isinstance(failure, PeerUnreachable):
        return "cannot be reached"
    if isinstance(failure, DeadlineExceeded):
        return f"fell silent: it gave {failure}"
    return f"broke the protocol ({failure})"
