"""Where two contributions become one: the mean of z over a pair.

With ẑ for z as the other side reads it, the losses of codecs included, replica i averages to

    mean = z_i + ½(ẑ_j − ẑ_i)                                                          (1)

Its partner computes the same difference with the opposite sign. So the mean of φ over the pair moves by the mean
progress of the two and by nothing else, exactly, whatever the codecs lose: rounding only shows in how far apart the
two remain, which the next meetings shrink as they shrink everything that is between replicas.
"""

from __future__ import annotations

import torch

from node.contribution import Contribution
from node.offer import Offer, sample_stride, sampled


class Pull:
    """½(ẑ_j − ẑ_i), made when it is asked for, so that a piece is still in the cache when it is used.

    Mutable state: which pieces are made, and the sample of them. They are in the memory of the partner's
    contribution, and on a GPU in a tensor of their own.
    """

    def __init__(self, offer: Offer, partners: Contribution, device: torch.device) -> None:
        self._offer = offer
        self._partners = partners
        self._on_cpu = device.type == "cpu"
        self._values = partners.total if self._on_cpu else torch.empty_like(partners.total, device=device)
        self._made: set[int] = set()
        self.sample = torch.empty_like(sampled(self._values))  # of the pieces as they were made

    @torch.no_grad()
    def piece(self, index: int, bounds: slice) -> torch.Tensor:
        """Piece `index`, the entries of `bounds`; its user may write over it.

        Halves are subtracted: the difference of two finite numbers may not be finite.
        """
        values = self._values[bounds]
        if index not in self._made:
            self._made.add(index)
            half = self._partners.finish(index, bounds)
            if not self._on_cpu:
                values.copy_(half)
            self._offer.add_as_sent(index, bounds, values, -0.5)
            stride = sample_stride(self._values.numel())
            picked, first = values[-bounds.start % stride :: stride], -(-bounds.start // stride)
            self.sample[first : first + len(picked)].copy_(picked)
        return values

    def whole(self) -> torch.Tensor:
        """All of it, [parameters], on the device of the own weights; what is written to it counts."""
        for index, bounds in self._offer.pieces():
            self.piece(index, bounds)
        return self._values
