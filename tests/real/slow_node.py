"""`noloco-node` on a machine whose last stage takes `SECONDS` for a microbatch, for test_slow_stage_for_real.py."""

from __future__ import annotations

import math
import time

import torch

from node import cli
from node.model.stage_work import LossAndAnswer, StageWork
from node.model.transfer import Pending
from node.service import service

SECONDS = 15.0


class SlowStageWork(StageWork):
    """Slow in training alone: the dry step before it takes as long as ever."""

    def last_stage(
        self, inputs: torch.Tensor, labels: torch.Tensor, most: float = math.inf
    ) -> Pending[LossAndAnswer]:
        time.sleep(SECONDS)
        return super().last_stage(inputs, labels, most)


if __name__ == "__main__":
    service.StageWork = SlowStageWork  # type: ignore[misc, attr-defined]
    cli.main()
