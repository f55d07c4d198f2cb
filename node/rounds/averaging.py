"""Where two contributions become one: the mean of z over a pair.

With ẑ for z as the other side reads it, the losses of codecs included, replica i averages to

    mean = z_i + ½(ẑ_j − ẑ_i)                                                          (1)

Its partner computes the same difference with the opposite sign. So the mean of φ over the pair moves by the mean
progress of the two and by nothing else, exactly, whatever the codecs lose: rounding only shows in how far apart the
two remain, which the next meetings shrink as they shrink everything that is between replicas.
"""

from __future__ import annotations

import torch

from node.model.replica import PIECE_PARAMETERS
from node.rounds.incoming_update import IncomingUpdate
from node.rounds.outgoing_update import OutgoingUpdate, sample_stride, sampled


class Pull:
    """½(ẑ_j − ẑ_i), a piece at a time, so that it is still in the cache when it is used.

    Mutable state: room for a piece, all pieces once they were asked for, and the sample of those made.
    """

    def __init__(self, offer: OutgoingUpdate, partners: IncomingUpdate, device: torch.device) -> None:
        self._offer = offer
        self._partners = partners
        self._device = device
        self._room = torch.empty(PIECE_PARAMETERS)
        self._values: torch.Tensor | None = None
        self._stride = sample_stride(partners.total.numel())
        # every n-th value of the pull, filled in as pieces are made
        self.sample = torch.empty_like(sampled(partners.total), device=device)

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
            total = self._partners.total
            values = total if self._device.type == "cpu" else torch.empty_like(total, device=self._device)
            for index, bounds in self._offer.pieces():
                made = self._make(index, bounds, total[bounds])
                if values is not total:
                    values[bounds].copy_(made)
            self._values = values
        return self._values

    def _make(self, index: int, bounds: slice, room: torch.Tensor) -> torch.Tensor:
        """Halves are subtracted: the difference of two finite numbers may not be finite."""
        self._partners.read(index, bounds, room)
        values = room.to(self._device)
        self._offer.add_as_sent(index, bounds, values, -0.5)
        picked, first = values[-bounds.start % self._stride :: self._stride], -(-bounds.start // self._stride)
        self.sample[first : first + len(picked)].copy_(picked)
        return values
