"""Has the next stage compute a microbatch: drives its `Passage` with messages and a timer."""

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
from node.pipeline.checks import Checks
from node.pipeline.conduct import Conduct
from node.pipeline.gradient_screen import GradientScreen
from node.pipeline.late_answers import Asking, LateAnswers
from node.pipeline.microbatch import Microbatch
from node.pipeline.next_stage import NextStage
from node.pipeline.passage import (
    Action,
    Answer,
    AskBacklog,
    Blame,
    Due,
    Ended,
    Event,
    GiveUp,
    LetFinish,
    Passage,
    Report,
    ReportNobody,
    Send,
    SetTimer,
    Take,
    Told,
)
from node.pipeline.routing import FixedRouter, Router
from protocol.codecs.codec import Encoded
from protocol.errors import (
    DeadlineExceeded,
    NolocoError,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.messages.training import Forward, GetBacklog, Gradient, Return
from protocol.rpc.patience import Patience, ignore
from protocol.supervision import all_of

logger = logging.getLogger(__name__)


@dataclass
class _Sending:
    """A microbatch on its way to the next stage: what is sent, and the requests under way."""

    microbatch: Microbatch
    parcel: list[Encoded]
    passage: Passage
    due: float  # when the timer fires, by `View.elapsed`
    requests: dict[PeerId, Asking] = field(default_factory=dict)
    answer: tuple[float, torch.Tensor] | None = None  # the first one
    taken_of: PeerId | None = None

    def note_progress(self, peer: PeerId, progress: Progress) -> None:
        """Note that the microbatch gets on, by the word of the peer that was asked last."""
        if next(reversed(self.requests), None) == peer:
            self.microbatch.note_onward(progress)


class StageClient:
    """Sends microbatches to peers of the next stage, as the `Passage` of each says.

    In a ring the stage after the last is the first one; the peer that drew the sequences comes before random ones.
    """

    def __init__(self, context: Context, rng: random.Random) -> None:
        manifest, view = context.manifest, context.view
        self._context = context
        self._stage = manifest.stage_after(context.stage)
        self._returns = self._stage == 0
        # what returns to its origin, or goes to a fixed peer, leaves no choice
        is_random = manifest.routing == "random" and not self._returns
        if manifest.routing == "fixed":
            router: Router = FixedRouter(rng, self._own_place)
        else:
            router = Router(rng, view.shares, view.ledger.is_proven, context.transport.goes_through_others)
        behind, limit = manifest.hops - 1 - context.stage, manifest.limits.microbatch_deadline
        self._next = NextStage(router, limit, behind, view.group_of, is_random)
        self._screen = GradientScreen()
        self._conduct = Conduct(context, self._stage)
        self._checks = Checks(context, context.random())
        self._late = LateAnswers(context, self._conduct)
        self._tasks = context.supervisor.group()

    def _own_place(self) -> int:
        """The place of this replica among those of its stage, by peer id."""
        context = self._context
        others = context.view.serving(context.stage, context.transport.now())
        return sum(peer < context.me for peer in others)

    def prepare_to_leave(self) -> None:
        """Send what others can still take; do not wait for peers that may never come."""
        self._next.is_leaving = True

    async def send(self, microbatch: Microbatch, parcel: list[Encoded]) -> tuple[float, torch.Tensor]:
        """Send to random peers of the next stage until one answers; returns its loss and the gradient.

        The parcel has activations and labels. Raises `Refused` when two peers, or the only one, refuse it for its
        content or give gradients for it that are out of all proportion.
        """
        now, origin = self._context.view.elapsed(), microbatch.origin
        home = origin.peer if self._returns and origin is not None else None
        sending = _Sending(microbatch, parcel, Passage(self._next, now, home), now)
        try:
            while sending.taken_of is None:
                for action in await self._next_actions(sending):
                    self._carry_out(sending, action)
        finally:
            for asking in sending.requests.values():
                asking.cancel()
        assert sending.answer is not None
        if self._next.is_random:
            self._check(sending, sending.taken_of, sending.answer[1])
        return sending.answer

    async def _next_actions(self, sending: _Sending) -> list[Action]:
        """Wait until the timer fires or requests have ended; return what the passage wants done then."""
        left = sending.due - self._context.view.elapsed()
        if left > 0 and not sending.requests:
            await asyncio.sleep(left)
            left = 0.0
        if left <= 0:
            sending.due = math.inf
            actions = self._handle(sending, Due(self._conduct.usable()))
            questions = [action for action in actions if isinstance(action, AskBacklog)]
            told = await all_of(*(self._question(sending, question) for question in questions))
            return [action for ended in told for action in ended] if questions else actions
        done, _ = await asyncio.wait(
            sending.requests.values(),
            timeout=None if math.isinf(left) else left,
            return_when=asyncio.FIRST_COMPLETED,
        )
        ended = [peer for peer, asking in sending.requests.items() if asking in done]
        return [action for peer in ended for action in sending.requests.pop(peer).result()]

    def _handle(self, sending: _Sending, event: Event) -> list[Action]:
        return sending.passage.handle(event, self._context.view.elapsed())

    def _carry_out(self, sending: _Sending, action: Action) -> None:
        match action:
            case Send(peer):
                sending.microbatch.mark_onward()
                asking = self._tasks.start(self._request(sending, action), "asking a peer")
                asking.add_done_callback(partial(self._ended, sending, peer))
                sending.requests[peer] = asking
            case SetTimer(seconds):
                sending.due = self._context.view.elapsed() + seconds
            case Take(peer):
                sending.taken_of = peer
                self._conduct.record_good(peer)
            case LetFinish(peer):
                if peer in sending.requests:  # else it has ended at the same time
                    self._late.let_finish(sending.requests.pop(peer), action)
            case Report(peer, Refused() as refusal, asked):
                self._conduct.record_overruled(peer, refusal, asked)
            case Report(peer, failure, asked):
                self._conduct.record_failure(peer, failure, asked)
                self._context.counters.resends += 1
            case Blame(peer):
                self._conduct.record_bad(peer)
            case ReportNobody():
                self._conduct.record_nobody()
            case GiveUp(error):
                raise error

    # --- what others are asked ----------------------------------------------------------------

    async def _question(self, sending: _Sending, question: AskBacklog) -> list[Action]:
        backlog: float | NolocoError
        try:
            message = GetBacklog(stage=self._stage)
            answer, _ = await self._context.rpc.call(question.peer, message, deadline=question.deadline)
            backlog = answer.seconds
        except NolocoError as failure:
            backlog = failure
        return self._handle(sending, Told(question.peer, backlog))

    async def _request(self, sending: _Sending, send: Send) -> list[Action]:
        """Have one peer compute the microbatch; return what its answer leads to."""
        peer, patience = send.peer, self._patience(send.silence, partial(sending.note_progress, send.peer))
        try:
            reply, gradient = await self._ask(peer, sending.microbatch, sending.parcel, patience)
        except (Refused, PeerUnreachable, DeadlineExceeded, WireError, TransportDown) as failure:
            logger.debug("Peer %s did not take a microbatch: %s", peer[-8:], failure)
            return self._handle(sending, Ended(peer, failure))
        if not sending.passage.is_over:
            sending.answer = reply.loss, gradient
        return self._handle(sending, Ended(peer, Answer(_load(reply), patience.longest_silence)))

    def _ended(self, sending: _Sending, peer: PeerId, asking: Asking) -> None:
        """Note a request that did not come to its end, if it began at all."""
        if asking.cancelled() or asking.exception() is not None:
            self._handle(sending, Ended(peer, None))

    def _patience(self, silence: float, told: Callable[[Progress], None] = ignore) -> Patience:
        times = self._next.times
        return Patience(silence, times.standstill, told, times.at_most())

    async def _ask(
        self, peer: PeerId, microbatch: Microbatch, parcel: list[Encoded], patience: Patience
    ) -> tuple[Gradient, torch.Tensor]:
        """Have one peer compute a microbatch; return its reply and the gradient of the activations, screened.

        Raises what `Rpc.call` does, and `OddGradient` for a gradient out of proportion. A microbatch may be sent
        again: its id makes that harmless.
        """
        context = self._context
        message: Forward | Return = self._message(microbatch)
        screened = partial(self._screened, peer, parcel)
        answer = await context.rpc.call_and_read(peer, message, parcel, deadline=patience, read=screened)
        context.counters.sent.note(peer)
        if not self._returns:
            context.contributions.note_tokens(peer, context.manifest.tokens_per_microbatch)
        if context.stage == 0:  # which nobody sends microbatches to, so that those who get them sign
            context.contributions.note_given(peer, context.manifest.tokens_per_microbatch)
        return answer

    def _screened(
        self, peer: PeerId, parcel: list[Encoded], reply: Gradient, tensors: list[torch.Tensor]
    ) -> tuple[Gradient, torch.Tensor]:
        return reply, self._screen.checked(peer, parcel[1], tensors[0])

    def _message(self, microbatch: Microbatch) -> Forward | Return:
        origin, name = microbatch.origin, microbatch.onward_name
        peer, draw = (origin.peer, origin.draw) if origin is not None else ("", "")
        if self._returns:
            return Return(microbatch=name, home=peer, draw=draw)
        step = microbatch.step if self._context.manifest.inner.clock == "run" else 0
        return Forward(microbatch=name, stage=self._stage, home=peer, draw=draw, step=step)

    def _check(self, sending: _Sending, peer: PeerId, gradient: torch.Tensor) -> None:
        """Perhaps have other peers compute the microbatch, too, and compare their answers."""
        peers, following, clock = self._conduct.usable(), self._next, self._context.view.elapsed
        microbatch, parcel = sending.microbatch, sending.parcel

        async def ask(other: PeerId) -> torch.Tensor:
            sent, patience = clock(), self._patience(following.silence(has_others=True))
            following.sent(other, sent)
            try:
                reply, answer = await self._ask(other, microbatch, parcel, patience)
            except BaseException:
                following.unanswered(other, sent)
                raise
            following.answered(other, sent, clock(), _load(reply), patience.longest_silence)
            return answer

        self._checks.consider(peer, gradient, peers, lambda: following.router.is_full(peer, peers), ask)


def _load(reply: Gradient) -> float:
    """Seconds that a microbatch takes at a peer with its queue, as the peer says."""
    return reply.seconds * (1 + reply.queue)
