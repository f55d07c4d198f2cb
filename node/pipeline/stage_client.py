"""The way of a microbatch to the next stage: a random live peer, and another one when that fails.

In a ring the stage after the last is the first one, and the peer that drew the sequences comes before random ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import torch

from node.context import Context
from node.links.links import AdaptiveDeadline
from node.pipeline.conduct import CONTENT, Conduct
from node.pipeline.deliveries import Passage
from node.pipeline.routing import FixedRouter, Router
from protocol.codec import Encoded
from protocol.errors import (
    CodecError,
    DeadlineExceeded,
    NolocoError,
    PeerUnreachable,
    Refused,
    TransportDown,
    WireError,
)
from protocol.messages.training import Forward, Return
from protocol.patience import Patience
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05  # before asking again peers that were all busy, doubling up to the next line
MOST_RETRY_SECONDS = 0.8
PAUSE_SECONDS = 0.5  # between looks for a live peer of the next stage
LEAST_DEADLINE = 5.0  # of silence; three signs of life fit into it, and below it deadlines only cause resends
# times `limits.microbatch_deadline` for each stage behind: as long a peer may say that it works on a microbatch
# without getting on with it
STALLED = 10.0
ENOUGH_REFUSALS = 2  # peers that refuse a microbatch for its content: it is the content


@dataclass(frozen=True)
class Home:
    """Where a microbatch comes from: the peer that drew its sequences, and the name that it gave them."""

    peer: PeerId
    draw: str


class StageClient:
    """Mutable state: what the router, the deadline and the record of conduct learned; whether this node leaves."""

    def __init__(self, context: Context, rng: random.Random) -> None:
        self._context = context
        self._next = context.manifest.stage_after(context.stage)
        self._goes_home = self._next == 0
        self._conduct = Conduct(context)
        fixed = context.manifest.routing == "fixed"
        self._router = FixedRouter(rng, self._own_place) if fixed else Router(rng)
        self._deadline = AdaptiveDeadline(context.manifest.limits.microbatch_deadline, LEAST_DEADLINE)
        self._told_no_peer = False
        self._leaving = False

    def _own_place(self) -> int:
        """The place of this replica among those of its stage, by peer id."""
        context = self._context
        others = context.view.serving(context.stage, context.transport.now())
        return sum(peer < context.me for peer in others)

    def prepare_to_leave(self) -> None:
        """Send what others can still take; do not wait for peers that may never come."""
        self._leaving = True

    async def send(
        self, microbatch: str, parcel: list[Encoded], passage: Passage, home: Home | None = None
    ) -> tuple[float, torch.Tensor]:
        """To random peers of the next stage until one answers; returns its loss and the gradient.

        `microbatch` names these very activations. Each failure costs one resend to another peer. With no live peer
        this waits for one to appear. Raises `Refused` when two peers, or the only one, refuse it for its content.
        """
        context, tried = self._context, set[PeerId]()
        refusals: dict[PeerId, Refused] = {}  # for its content
        pause = RETRY_SECONDS
        while True:
            peers = self._conduct.trusted(context.view.serving(self._next, context.transport.now()))
            peer = self._choose(peers, tried | refusals.keys(), home)
            if peer is None:
                if refusals and refusals.keys() >= set(peers):
                    raise next(iter(refusals.values()))
                await self._wait_for_peers(pause if peers else None)
                pause = min(MOST_RETRY_SECONDS, 2 * pause)  # each try carries the whole activations
                tried.clear()
                continue
            asked, others = context.view.elapsed(), set(peers) - tried - {peer}
            passage.goes_onward()
            try:
                answer = await self._ask(peer, self._message(microbatch, home), parcel, passage, bool(others))
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
            except TransportDown as problem:
                if self._leaving:
                    raise
                logger.debug("Waiting for the network: %s", problem)
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._conduct.did_well(peer)
                for overruled in refusals:
                    self._conduct.offended(overruled)
                self._told_no_peer = False
                return answer

    def _choose(self, peers: list[PeerId], exclude: set[PeerId], home: Home | None) -> PeerId | None:
        if self._goes_home and home is not None and home.peer not in exclude:
            return home.peer
        return self._router.choose(peers, exclude=exclude)

    async def _ask(
        self, peer: PeerId, message: Forward | Return, parcel: list[Encoded], passage: Passage, others: bool
    ) -> tuple[float, torch.Tensor]:
        """With `others` to ask the peer has the silence that is usual, else all that the manifest allows: asked again
        over the same connection it would not be heard sooner.
        """
        context, limit = self._context, self._context.manifest.limits.microbatch_deadline
        stages_behind = context.manifest.hops - 1 - context.stage
        patience = Patience(
            self._deadline.seconds() if others else limit,
            # the stage before waits longer, so that it does not resend first
            STALLED * limit * stages_behind,
            passage.note_onward,
        )
        reply, tensors = await context.rpc.call(peer, message, parcel, deadline=patience)
        try:
            if len(tensors) != 1 or tuple(tensors[0].shape) != parcel[0].shape:
                raise CodecError("the gradient does not have the shape of the activations")
            self._conduct.require_proportion(tensors[0])
        except CodecError:
            context.rpc.strike(peer)
            raise
        self._deadline.note(patience.longest_silence)
        self._router.note(peer, reply.seconds, reply.queue)
        context.counters.sent.note(peer)
        return reply.loss, tensors[0]

    def _message(self, microbatch: str, home: Home | None) -> Forward | Return:
        peer, draw = (home.peer, home.draw) if home is not None else ("", "")
        if self._goes_home:
            return Return(microbatch=microbatch, home=peer, draw=draw)
        return Forward(microbatch=microbatch, stage=self._next, home=peer, draw=draw)

    def _note_failure(self, peer: PeerId, failure: NolocoError, asked: float) -> None:
        context = self._context
        if isinstance(failure, DeadlineExceeded):
            self._deadline.note_missed()
        if isinstance(failure, WireError):
            self._conduct.offended(peer)
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
        if not self._told_no_peer:
            self._told_no_peer = True
            stage = self._next
            self._context.events.warn(
                f"No live peer serves stage {stage} at present; waiting for one.", "no-peer", stage=stage
            )
        await asyncio.sleep(PAUSE_SECONDS)


def _what_happened(failure: NolocoError) -> str:
    if isinstance(failure, PeerUnreachable):
        return "cannot be reached"
    if isinstance(failure, DeadlineExceeded):
        return f"fell silent: it gave {failure}"
    return f"broke the protocol ({failure})"
