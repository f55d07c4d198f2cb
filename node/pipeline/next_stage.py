"""Chooses peers of the next stage and asks one of them at a time to compute a microbatch.

In a ring the stage after the last is the first one, and the peer that drew the sequences comes before random ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import partial

import torch

from node.context import Context
from node.links.links import AdaptiveDeadline
from node.pipeline.answer_times import AnswerTimes
from node.pipeline.gradient_screen import GradientScreen
from node.pipeline.microbatch import Microbatch, Origin
from node.pipeline.routing import FixedRouter, Router
from node.pipeline.two_choices import TwoChoices
from protocol.codecs.codec import Encoded
from protocol.errors import DeadlineExceeded, NolocoError, Refused
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.messages.training import Forward, GetBacklog, Gradient, Return
from protocol.rpc.patience import Patience, ignore
from protocol.supervision import all_of

LEAST_DEADLINE = 5.0  # of silence; three signs of life fit into it, and below it deadlines only cause resends


class NextStage:
    """Chooses peers of the stage after this node's and asks them, learning from each answer how long they take."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self.stage = context.manifest.stage_after(context.stage)
        self._returns_to_origin = self.stage == 0
        # what returns to its origin, or goes to a fixed peer, leaves no choice
        self.is_random = context.manifest.routing == "random" and not self._returns_to_origin
        self._screen = GradientScreen()
        if context.manifest.routing == "fixed":
            self._router: Router = FixedRouter(rng, self._own_place)
        else:
            self._router = Router(rng, context.view.shares, context.view.ledger.is_proven)
        self._choices = TwoChoices(self._router, context.view.group_of)
        limit = context.manifest.limits.microbatch_deadline
        self._deadline = AdaptiveDeadline(limit, LEAST_DEADLINE)
        self.times = AnswerTimes(limit, context.manifest.hops - 1 - context.stage)

    def _own_place(self) -> int:
        """The place of this replica among those of its stage, by peer id."""
        context = self._context
        others = context.view.serving(context.stage, context.transport.now())
        return sum(peer < context.me for peer in others)

    @property
    def holders(self) -> Collection[PeerId]:
        """The peers that have a microbatch of this node."""
        return self._choices.holders

    def is_full(self, peer: PeerId, peers: list[PeerId]) -> bool:
        """Return whether the peer has all of the last microbatches that one of the `peers` gets."""
        return self._router.is_full(peer, peers)

    async def choose(
        self, peers: list[PeerId], exclude: set[PeerId], origin: Origin | None, waited: float
    ) -> PeerId | None:
        """Choose the microbatch's origin, or one of `peers` at random; None where none is left to ask.

        A peer is left out that is in `exclude`, or has its share already unless the microbatch has `waited` longer,
        in seconds, than answers take.
        """
        if self._returns_to_origin and origin is not None and origin.peer not in exclude:
            return origin.peer
        if not self.is_random:
            return self._router.choose(peers, exclude, waited)
        candidates = self._choices.candidates(peers, exclude, waited)
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        backlogs: dict[PeerId, float] = {}
        if self._choices.asks:
            answers = zip(candidates, await all_of(*map(self._backlog, candidates)), strict=True)
            backlogs = {peer: seconds for peer, seconds in answers if seconds is not None}
        return self._choices.chosen(candidates, backlogs, self._context.view.elapsed())

    async def _backlog(self, peer: PeerId) -> float | None:
        """Seconds of work that the peer has; None if it takes no more or does not answer in a few round trips."""
        times, view = self._choices.times, self._context.view
        began, answer = view.elapsed(), None
        try:
            answer, _ = await self._context.rpc.call(
                peer, GetBacklog(stage=self.stage), deadline=times.deadline_of(peer)
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

    async def ask(
        self,
        peer: PeerId,
        microbatch: Microbatch,
        parcel: list[Encoded],
        others: bool,
        note_progress: Callable[[Progress], None] = ignore,
    ) -> tuple[float, torch.Tensor]:
        """Have one peer compute a microbatch; return its loss and the gradient of the activations, screened.

        With `others` to ask, the peer may be silent for as long as is usual, else for all that the manifest allows:
        asked again over the same connection it would not be heard sooner. Raises what `Rpc.call` does, and
        `OddGradient` for a gradient out of proportion. A microbatch may be sent again: its id makes that harmless.
        """
        context, times = self._context, self.times
        limit = context.manifest.limits.microbatch_deadline
        silence = self._deadline.seconds() if others else limit
        patience = Patience(silence, times.standstill, note_progress, times.at_most())
        began = context.view.elapsed()
        self._router.turns.taken(peer)
        self._choices.sent(peer, began)
        try:
            message: Forward | Return = self._message(microbatch)
            reply, gradient = await context.rpc.call_and_read(
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
        step = microbatch.step if self._context.manifest.inner.clock == "run" else 0
        return Forward(microbatch=name, stage=self.stage, home=peer, draw=draw, step=step)

    def note_failure(self, peer: PeerId, failure: NolocoError) -> None:
        """Forget how long the peer takes, and learn from a deadline that was missed."""
        if isinstance(failure, DeadlineExceeded):
            self._deadline.note_missed()
        self._router.forget(peer)
