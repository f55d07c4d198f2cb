"""Computes the pull of a round on a replica: half the difference of the pair's contributions, as they were read."""

from __future__ import annotations

import torch

from node.model.fragment import Fragment, Stretch
from node.rounds.contribution import IncomingUpdate, OutgoingUpdate, sample_stride, sampled
from protocol.codecs.kernels import BLOCK

PIECES_IN_A_COPY = 64  # to a GPU: 64 MiB


class Pull:
    """½(ẑ_j − ẑ_i), a piece at a time, so that it is still in the cache when it is used."""

    def __init__(
        self,
        outgoing: OutgoingUpdate,
        incoming: IncomingUpdate,
        own: Fragment,
        unread: torch.Tensor | None = None,
    ) -> None:
        """`unread`, bool [blocks], is true where one of the two could not read the other: nothing is pulled there."""
        self._unread = unread
        self._outgoing = outgoing
        self._incoming = incoming
        self._own = own
        self._device = own.device
        self._room = torch.empty(own.all_pieces.entries)
        self._values: torch.Tensor | None = None
        self._stride = sample_stride(incoming.total.numel())
        # every n-th value of the pull, filled in as pieces are made
        self.sample = torch.empty_like(sampled(incoming.total), device=own.device)

    @torch.no_grad()
    def piece(self, piece: Stretch) -> torch.Tensor:
        """Return one piece, on the device of the weights; as `whole` was left, if it was.

        Its user may write over it; it lasts until the next one is asked for.
        """
        if self._values is not None:
            return self._values[piece.bounds]
        return self._make(piece, self._room[: len(piece)])

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        """All of it, [parameters], in the memory of the partner's contribution where that is on the same device.

        What is written to it counts.
        """
        if self._values is None:
            total = self._incoming.total
            if self._own.steps_at_once:
                self._values = self._whole_there(total)
            else:
                for piece in self._own.all_pieces.in_groups(1):
                    self._make(piece, total[piece.bounds])
                self._values = total
        return self._values

    def _whole_there(self, total: torch.Tensor) -> torch.Tensor:
        """Make the whole on another device: what has losses is put together here and goes there in large copies.

        Memory is taken there first, so that a failure has changed nothing.
        """
        values = torch.zeros_like(total, device=self._device)
        everything = self._own.all_pieces
        large = list(everything.in_groups(PIECES_IN_A_COPY))
        room = torch.empty(len(large[0]), device=self._device)
        for pieces in large:
            self._outgoing.add_without_losses(pieces, values[pieces.bounds], -0.5)
        for piece in everything.in_groups(1):
            self._incoming.read(piece, total[piece.bounds])
            self._outgoing.add_with_losses(piece, total[piece.bounds], -0.5)
        for pieces in large:
            values[pieces.bounds].add_(room[: len(pieces)].copy_(total[pieces.bounds]))
        for pieces in everything.in_groups(self._own.pieces_at_once):
            self._outgoing.add_near(pieces, values[pieces.bounds], -0.5)
        self._drop_unread(values, everything)
        self.sample.copy_(sampled(values))
        return values

    def _make(self, piece: Stretch, room: torch.Tensor) -> torch.Tensor:
        """Make a piece by subtracting halves: the difference of two finite numbers may not be finite."""
        self._incoming.read(piece, room)
        values = room.to(self._device)
        self._outgoing.add_as_sent(piece, values, -0.5)
        self._drop_unread(values, piece)
        start, stride = piece.bounds.start, self._stride
        picked, first = values[-start % stride :: stride], -(-start // stride)
        self.sample[first : first + len(picked)].copy_(picked)
        return values

    def _drop_unread(self, values: torch.Tensor, pieces: Stretch) -> None:
        """Set to 0, in these pieces, the blocks that one of the two could not read."""
        if self._unread is not None and (unread := self._unread[pieces.blocks]).any():
            values[unread.repeat_interleave(BLOCK)[: len(values)].to(values.device)] = 0
