"""The exchange of a round: z to the partner in pieces, the partner's z back, both at the same time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import torch

from node.context import Context
from node.deadlines import AdaptiveDeadline
from node.pairing import Pair
from node.replica import PIECE_PARAMETERS, Replica
from protocol.codec import TensorSpec, decode, encode, require_finite
from protocol.errors import CodecError, DeadlineExceeded, NolocoError
from protocol.messages import Contribute, Done
from protocol.rpc import Traffic

LEAST_DEADLINE = 5.0  # the partner first ends its inner step, on a busy machine
PIECES_IN_FLIGHT = 4
SAMPLED_PARAMETERS = 2**16  # of φ, for the distance to the partner: its error is then below a percent


@dataclass
class Received:
    """The partner's contribution as it arrives."""

    z: torch.Tensor
    phi_sample: torch.Tensor | None = None
    pieces: set[int] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    """Mutable state: contributions expected or arriving, by the pair's name, and past exchange times."""

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._deadline = AdaptiveDeadline(context.manifest.limits.gossip_deadline, LEAST_DEADLINE)
        self._received: dict[str, Received] = {}

    def expect(self, pair: Pair) -> None:
        """Take memory for the contribution of this pair's partner."""
        self._received.setdefault(pair.name, Received(torch.empty_like(self._replica.phi)))

    def forget_all(self) -> None:
        self._received.clear()

    def phi_sample(self) -> torch.Tensor:
        """Every n-th entry of φ, the same on both sides."""
        return self._replica.phi[:: self._stride].cpu()

    async def swap(self, pair: Pair, z: torch.Tensor) -> Received | None:
        """Send z and receive the partner's at the same time; None when either fails before the deadline."""
        context, began = self._context, asyncio.get_running_loop().time()
        self.expect(pair)
        incoming = self._received[pair.name]
        try:
            async with asyncio.timeout(self._deadline.seconds()):
                await self._send(pair, z)
                await incoming.complete.wait()
        except (NolocoError, TimeoutError) as failure:
            if isinstance(failure, TimeoutError | DeadlineExceeded):
                self._deadline.note_missed()
            context.view.suspect(pair.partner, context.transport.now())
            context.events.warn(
                f"Averaging with {pair.partner[-8:]} failed ({type(failure).__name__}); this round counts "
                "its own progress alone.",
                "exchange-failed",
                partner=pair.partner,
                reason=type(failure).__name__,
            )
            if not incoming.complete.is_set():
                return None
        self._deadline.note(asyncio.get_running_loop().time() - began)
        return incoming

    async def _send(self, pair: Pair, z: torch.Tensor) -> None:
        slots = asyncio.Semaphore(PIECES_IN_FLIGHT)
        sample = self.phi_sample()
        codec = self._context.manifest.wire.gossip

        async def send_piece(offset: int) -> None:
            async with slots:
                piece = z[offset : offset + PIECE_PARAMETERS].cpu()
                tensors = [encode(piece, codec)] + ([encode(sample, "fp32")] if offset == 0 else [])
                await self._context.rpc.call(
                    pair.partner,
                    Traffic.GOSSIP,
                    Contribute(pair=pair.name, offset=offset, total=z.numel()),
                    Done,
                    tensors,
                    deadline=self._deadline.seconds(),
                )

        offsets = range(0, z.numel(), PIECE_PARAMETERS)
        tasks = [asyncio.get_running_loop().create_task(send_piece(offset)) for offset in offsets]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def as_sent(self, z: torch.Tensor) -> torch.Tensor:
        """z as the partner reads it: both must average the same two tensors, codec losses included."""
        codec = self._context.manifest.wire.gossip
        if codec == "fp32":
            return z
        encoded = encode(z, codec)
        spec = TensorSpec(codec, encoded.shape, encoded.nbytes)
        return decode(spec, b"".join(encoded.buffers)).to(z.device, z.dtype)

    def receive(self, message: Contribute, tensors: list[torch.Tensor]) -> None:
        """Keep a piece of an expected contribution.

        Raises `CodecError` when it does not fit or holds NaN or infinity; nothing of it is then kept.
        """
        incoming = self._received[message.pair]
        stop = min(message.offset + PIECE_PARAMETERS, self._replica.parameters)
        expected = [(stop - message.offset,)]
        if message.offset == 0:
            expected.append((math.ceil(self._replica.parameters / self._stride),))
        if (
            message.total != self._replica.parameters
            or message.offset % PIECE_PARAMETERS
            or message.offset >= message.total
            or [tuple(tensor.shape) for tensor in tensors] != expected
        ):
            raise CodecError("a contribution does not have the shape of this stage")
        for tensor in tensors:
            require_finite(tensor)
        incoming.z[message.offset : stop].copy_(tensors[0])
        if message.offset == 0:
            incoming.phi_sample = tensors[1].clone()
        incoming.pieces.add(message.offset)
        if len(incoming.pieces) == self._replica.pieces:
            incoming.complete.set()

    @property
    def _stride(self) -> int:
        return max(1, self._replica.parameters // SAMPLED_PARAMETERS)
