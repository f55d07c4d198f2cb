"""Computes the pull of a round on a replica: half the difference of the pair's contributions, as they were read."""

from __future__ import annotations

import torch

from node.model.fragment import PIECE_PARAMETERS, Fragment
from node.rounds.contribution import IncomingUpdate, OutgoingUpdate, blocks_in, sample_stride, sampled
from protocol.codecs.kernels import BLOCK

AT_ONCE = 2**24  # entries worked on at a time on a GPU: 64 MiB


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
        self._room = torch.empty(PIECE_PARAMETERS)
        self._values: torch.Tensor | None = None
        self._stride = sample_stride(incoming.total.numel())
        # every n-th value of the pull, filled in as pieces are made
        self.sample = torch.empty_like(sampled(incoming.total), device=own.device)

    @torch.no_grad()
    def piece(self, index: int, bounds: slice) -> torch.Tensor:
        """Piece `index`, the entries of `bounds`, on the device of the own weights; as `whole` was left, if it was.

        Its user may write over it; it lasts until the next one is asked for.
        """
        if self._values is not None:
            return self._values[bounds]
        return self._make(index, bounds, self._room[: bounds.stop - bounds.start])

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
                for index, bounds in self._outgoing.pieces():
                    self._make(index, bounds, total[bounds])
                self._values = total
        return self._values

    def _whole_there(self, total: torch.Tensor) -> torch.Tensor:
        """Make the whole on another device: what has losses is put together here and goes there in large copies.

        Memory is taken there first, so that a failure has changed nothing.
        """
        values = torch.zeros_like(total, device=self._device)
        large = [slice(start, start + AT_ONCE) for start in range(0, len(values), AT_ONCE)]
        room = torch.empty(min(AT_ONCE, len(values)), device=self._device)
        for bounds in large:
            self._outgoing.add_without_losses(bounds, values[bounds], -0.5)
        for index, bounds in self._outgoing.pieces():
            self._incoming.read(index, bounds, total[bounds])
            self._outgoing.add_with_losses(index, total[bounds], -0.5)
        for bounds in large:
            values[bounds].add_(room[: len(total[bounds])].copy_(total[bounds]))
        for indices in self._own.in_groups(range(self._own.pieces)):
            self._outgoing.add_near(indices, values[self._own.bounds_of(indices)], -0.5)
        self._drop_unread(values, slice(0, len(values)))
        self.sample.copy_(sampled(values))
        return values

    def _make(self, index: int, bounds: slice, room: torch.Tensor) -> torch.Tensor:
        """Make a piece by subtracting halves: the difference of two finite numbers may not be finite."""
        self._incoming.read(index, bounds, room)
        values = room.to(self._device)
        self._outgoing.add_as_sent(index, bounds, values, -0.5)
        self._drop_unread(values, bounds)
        picked, first = values[-bounds.start % self._stride :: self._stride], -(-bounds.start // self._stride)
        self.sample[first : first + len(picked)].copy_(picked)
        return values

    def _drop_unread(self, values: torch.Tensor, bounds: slice) -> None:
        """Set to 0, in the entries of `bounds`, the blocks that one of the two could not read."""
        if self._unread is not None and (unread := self._unread[blocks_in(bounds)]).any():
            values[unread.repeat_interleave(BLOCK)[: len(values)].to(values.device)] = 0
