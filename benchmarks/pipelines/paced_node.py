"""`noloco-node` on a device of a given speed: each piece of work takes so long, whatever else the cores do.

Seconds of a microbatch, forward and backward, are in the environment as PACED_SECONDS; forward takes a third of them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from node import cli
from node.model.stage_work import LossAndAnswer, StageWork
from node.model.transfer import Pending
from node.service import service

T = TypeVar("T")

SECONDS = float(os.environ.get("PACED_SECONDS", "1"))
FORWARD_SHARE = 1 / 3


def _paced(seconds: float, work: Callable[[], T]) -> T:
    ends = time.monotonic() + seconds
    result = work()
    time.sleep(max(0.0, ends - time.monotonic()))
    return result


class PacedStageWork(StageWork):
    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Pending[Any]]:
        return _paced(FORWARD_SHARE * SECONDS, lambda: super(PacedStageWork, self).forward(inputs, labels))

    def backward(
        self, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor, loss: float = math.nan
    ) -> Pending[LossAndAnswer]:
        work = super().backward
        return _paced((1 - FORWARD_SHARE) * SECONDS, lambda: work(leaf, outputs, gradient, loss))

    def last_stage(
        self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf
    ) -> Pending[LossAndAnswer]:
        """Both passes in one piece."""
        return _paced(SECONDS, lambda: super(PacedStageWork, self).last_stage(inputs, labels, most))


if __name__ == "__main__":
    service.StageWork = PacedStageWork  # type: ignore[misc, attr-defined]
    cli.main()
