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
from node.offer import Offer


@torch.no_grad()
def pull_of(offer: Offer, partners: Contribution, device: torch.device) -> torch.Tensor:
    """½(ẑ_j − ẑ_i) [parameters] on `device`, where the own weights are. On the CPU it is in `partners`' memory.

    Halves are subtracted: the difference of two finite numbers may not be finite.
    """
    on_cpu = device.type == "cpu"
    pull = partners.total if on_cpu else torch.empty_like(partners.total, device=device)
    for index, bounds in offer.pieces():
        piece = partners.finish(index, bounds).mul_(0.5)
        if not on_cpu:
            pull[bounds].copy_(piece)
        offer.add_as_sent(index, bounds, pull[bounds], -0.5)
    return pull
