"""DiLoCo's averaging, the baseline: the mean of z over all live replicas of a stage.

Each replica owns a part of the flat tensor. It gets that part of z from everyone, and answers all of them with
the mean once everyone's is there: a reduce-scatter and an all-gather in one request and its reply. Every replica
sends and receives 2(N − 1)/N of the state, as in a ring, and waits for the slowest. NoLoCo exists to do without.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import torch

from node.context import Context
from node.model.replica import PIECE_PARAMETERS, Replica
from protocol.codec import as_read, encode, require_finite
from protocol.errors import CodecError, DeadlineExceeded, NolocoError, PeerUnreachable, Refused
from protocol.messages import Reduce, Reduced
from protocol.rpc import Answer, Request, Traffic
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

CALL_MARGIN = 2.0  # seconds a caller waits beyond the owner's own deadline
WAITING_PARTS = 4  # gathers a replica keeps open at once, of a few stragglers' rounds


@dataclass
class _Gather:
    """One part of z as it comes in; `mean` is set when all live replicas have given theirs, or time is up."""

    parts: dict[PeerId, torch.Tensor] = field(default_factory=dict)
    mean: asyncio.Future[torch.Tensor] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AllReduce:
    """Mutable state: the parts being gathered here, by their offset in the flat tensor."""

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._gathers: dict[int, _Gather] = {}
        self._seconds = context.manifest.limits.gossip_deadline
        self.bytes_sent = 0

    def live(self) -> list[PeerId]:
        """The group: this replica and all others of its stage that train, by peer id."""
        context = self._context
        return sorted({*context.view.serving(context.stage, context.transport.now()), context.me})

    async def mean(self, z: torch.Tensor) -> torch.Tensor:
        """The mean of z [parameters] over the live replicas.

        Deadline: the manifest's gossip deadline, for all parts at once. A part whose owner does not answer
        stays this replica's own; an owner answers with what it has when a member does not come.
        """
        group = self.live()
        size = min(PIECE_PARAMETERS, max(1, -(-z.numel() // len(group))))
        result = z.clone()

        async def reduce_part(index: int) -> None:
            bounds = slice(index * size, min((index + 1) * size, z.numel()))
            owner = group[index % len(group)]
            try:
                reduced = await self._ask(owner, bounds, z[bounds])
            except (DeadlineExceeded, PeerUnreachable):
                self._context.view.suspect(owner)
                return
            except NolocoError as failure:  # as when it counts the group differently for a moment
                logger.debug("No mean from %s: %s", owner[-8:], failure)
                return
            result[bounds].copy_(reduced)

        if len(group) > 1:
            await asyncio.gather(*(reduce_part(index) for index in range(-(-z.numel() // size))))
        return result

    async def _ask(self, owner: PeerId, bounds: slice, part: torch.Tensor) -> torch.Tensor:
        encoded = encode(part.cpu(), self._context.manifest.wire.gossip)
        if owner == self._context.me:
            return await self._contribute(owner, bounds.start, as_read(encoded))
        self.bytes_sent += 2 * encoded.nbytes  # it costs the owner as much to answer
        _, tensors = await self._context.rpc.call(
            owner,
            Traffic.GOSSIP,
            Reduce(offset=bounds.start, total=self._replica.parameters),
            Reduced,
            [encoded],
            deadline=self._seconds + CALL_MARGIN,
        )
        if len(tensors) != 1 or tensors[0].shape != part.shape:
            raise CodecError("the mean does not have the shape of the part that was sent")
        require_finite(tensors[0])
        return tensors[0]

    async def on_reduce(self, request: Request) -> Answer:
        """Another replica's part of z: answered with the mean. Refuses what does not fit this stage."""
        message: Reduce = request.message
        tensors = request.tensors()
        if message.total != self._replica.parameters or len(tensors) != 1 or tensors[0].dim() != 1:
            raise CodecError("a contribution does not have the shape of this stage")
        require_finite(tensors[0])
        mean = await self._contribute(request.peer, message.offset, tensors[0].clone())
        return Answer(Reduced(), [encode(mean, self._context.manifest.wire.gossip)])

    async def _contribute(self, peer: PeerId, offset: int, part: torch.Tensor) -> torch.Tensor:
        gather = self._gathers.get(offset)
        if gather is None:
            if len(self._gathers) >= WAITING_PARTS * len(self.live()):
                raise Refused("busy")
            gather = self._gathers[offset] = _Gather()
            timer = asyncio.get_running_loop().call_later(self._seconds, self._close, offset, gather)
            gather.mean.add_done_callback(lambda _: timer.cancel())
        if any(other.shape != part.shape for other in gather.parts.values()):
            raise Refused("busy")  # the other counts the group differently: a replica has just come or gone
        gather.parts[peer] = part
        if set(self.live()) <= gather.parts.keys():
            self._close(offset, gather)
        return await asyncio.shield(gather.mean)

    def _close(self, offset: int, gather: _Gather) -> None:
        if self._gathers.get(offset) is gather:
            del self._gathers[offset]
        if not gather.mean.done():
            members = [gather.parts[peer] for peer in sorted(gather.parts)]  # one order: one rounding
            gather.mean.set_result(torch.stack(members).mean(0))
