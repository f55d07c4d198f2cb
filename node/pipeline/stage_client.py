"""Sends a microbatch to the next stage: one of two random live peers, and another one when that fails.

In a ring the stage after the last is the first one, and the peer that drew the sequences comes before random ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import torch

from node.context import Context
from node.links.links import AdaptiveDeadline
from node.pipeline.checks import Checks
from node.pipeline.gradient_screen import CONTENT, GradientScreen
from node.pipeline.microbatch import Microbatch, Origin
from node.pipeline.routing import FixedRouter, Router
from node.pipeline.two_choices import TwoChoices
from protocol.codec import Encoded
from protocol.errors import (
    CodecError,
    DeadlineExceeded,
    NolocoError,
    OddLoss,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.ground import PeerId
from protocol.messages import Progress
from protocol.messages.training import Forward, GetBacklog, Return
from protocol.patience import Patience, ignore
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05  # before asking again peers that were all busy, doubling up to the next line
MOST_RETRY_SECONDS = 0.8
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
LEAST_DEADLINE = 5.0  # of silence; three signs of life fit into it, and below it deadlines only cause resends
# times `limits.microbatch_deadline` for each stage behind: as long a peer may say that it works on a microbatch
# without getting on with it
STALLED = 10.0
ENOUGH_REFUSALS = 2  # peers that refuse a microbatch for its content: it is the content


class StageClient:
    """Sends microbatches to peers of the next stage and tries another peer when one fails."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self._next = context.manifest.stage_after(context.stage)
        self._returns_to_origin = self._next == 0
        self._screen = GradientScreen(context)
        if context.manifest.routing == "fixed":
            self._router: Router = FixedRouter(rng, self._own_place)
        else:
            self._router = Router(rng, context.view.shares, context.view.ledger.is_proven)
        self._choices = TwoChoices(self._router)
        self._checks = Checks(context, context.random())
        self._deadline = AdaptiveDeadline(context.manifest.limits.microbatch_deadline, LEAST_DEADLINE)
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

        The parcel has activations and labels. Each failure costs one resend to another peer. With no live peer this
        waits for one to appear. Raises `Refused` when two peers, or the only one, refuse it for its content.
        """
        context, tried = self._context, set[PeerId]()
        refusals: dict[PeerId, Refused] = {}  # for its content
        pause, waiting_since = RETRY_SECONDS, context.view.elapsed()
        while True:
            peers = self._screen.usable(context.view.serving(self._next, context.transport.now()))
            waited = context.view.elapsed() - waiting_since
            peer = await self._choose(peers, tried | refusals.keys(), microbatch.origin, waited)
            if peer is None:
                if refusals and refusals.keys() >= set(peers):
                    raise next(iter(refusals.values()))
                await self._wait_for_peers(pause if peers else None)
                pause = min(MOST_RETRY_SECONDS, 2 * pause)  # each try carries the whole activations
                tried.clear()
                continue
            asked, others = context.view.elapsed(), set(peers) - tried - {peer}
            microbatch.mark_onward()
            try:
                answer = await self._ask(peer, microbatch, parcel, bool(others), microbatch.note_onward)
            except Refused as refusal:
                logger.debug("Peer %s refused a microbatch: %s", peer[-8:], refusal)
                tried.add(peer)
                if refusal.code in CONTENT:
                    refusals[peer] = refusal
                    if len(refusals) >= ENOUGH_REFUSALS:
                        raise
            except (PeerUnreachable, DeadlineExceeded, WireError) as failure:
                self._note_failure(peer, failure, asked)
                tried.add(peer)
                waiting_since = context.view.elapsed()
            except TransportDown as problem:
                if self._leaving:
                    raise
                logger.debug("Waiting for the network: %s", problem)
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._screen.record_good(peer)
                for overruled, said in refusals.items():
                    if said.code != OddLoss.CODE:  # of which each judges by what it has seen of this sender
                        self._screen.record_bad(overruled)
                self._tell_served_again()
                self._compare(microbatch, parcel, peer, answer[1], peers)
                return answer

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
        context, limit = self._context, self._context.manifest.limits.microbatch_deadline
        stages_behind = context.manifest.hops - 1 - context.stage
        patience = Patience(
            self._deadline.seconds() if others else limit,
            # the stage before waits longer, so that it does not resend first
            STALLED * limit * stages_behind,
            note_progress,
        )
        began = context.view.elapsed()
        self._router.turns.taken(peer)
        self._choices.sent(peer, began)
        try:
            message: Forward | Return = self._message(microbatch)
            reply, tensors = await context.rpc.call(peer, message, parcel, deadline=patience)
        except BaseException:
            self._router.turns.given_back(peer)
            raise
        finally:
            self._choices.returned(peer, began)
        try:
            if len(tensors) != 1 or tuple(tensors[0].shape) != parcel[0].shape:
                raise CodecError("the gradient does not have the shape of the activations")
            gradient = self._screen.checked(peer, parcel[1], tensors[0])
        except CodecError:
            context.rpc.strike(peer)
            raise
        self._deadline.note(patience.longest_silence)
        seconds = context.view.elapsed() - began
        self._router.note(peer, seconds, reply.seconds * (1 + reply.queue))
        context.counters.sent.note(peer)
        if not self._returns_to_origin:
            context.ledger.note_tokens(peer, context.manifest.tokens_per_microbatch)
        if context.stage == 0:  # which nobody sends microbatches to, so that those who get them sign
            context.ledger.note_given(peer, context.manifest.tokens_per_microbatch)
        return reply.loss, gradient

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
        context.events.warn(
            f"Peer {peer[-8:]} of stage {self._next} {_what_happened(failure)}; "
            "its microbatch goes to another one.",
            "resend",
            peer=peer,
            reason=type(failure).__name__,
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
