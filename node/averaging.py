"""Where two contributions become one: the mean of z over a pair. Pure."""

from __future__ import annotations

import torch


@torch.no_grad()
def mean_z(own: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    """The mean that both partners take the outer step with; written over `partners`, `own` stays.

    Both are [parameters] on one device, as the other side reads them: codec losses included. The two partners
    then compute the same bits, and the mean of φ over the pair moves as if both had lost nothing of each other.
    """
    return partners.add_(own).mul_(0.5)
