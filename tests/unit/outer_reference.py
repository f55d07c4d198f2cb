"""The outer step as the paper writes it, for all of a group together: what the replicas' own form must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from node.model.outer import OuterSettings


def outer_step_reference(
    phi: Sequence[Tensor], theta: Sequence[Tensor], delta: Sequence[Tensor], settings: OuterSettings
) -> tuple[list[Tensor], list[Tensor]]:
    """Eq. (1) and (2) as written, for all members of one group of any size, in one go.

    Entry i of each sequence is member i's. Returns the new (φ, δ) of every member; the arguments stay
    unchanged. It needs what no replica has: the tensors of all members.
    """
    mean_phi = torch.stack(list(phi)).mean(0)
    mean_progress = torch.stack([fast - slow for fast, slow in zip(theta, phi, strict=True)]).mean(0)
    new_delta = [
        settings.alpha * momentum + settings.beta * mean_progress + settings.gamma * (mean_phi - slow)
        for momentum, slow in zip(delta, phi, strict=True)
    ]
    return [slow + momentum for slow, momentum in zip(phi, new_delta, strict=True)], new_delta
