"""A plain PyTorch loop over the whole model: what pipelines are compared with."""

from __future__ import annotations

import time

from bootstrap.lab.simulation.learning import text_of
from node.model.replica import Replica
from node.storage.position import Position


def train_plainly(whole: Replica, seconds: float, warm_up_steps: int = 0) -> float:
    """Tokens per second of `whole`, one stage that is the whole model, in this process over about `seconds`.

    The microbatches, optimizer and clipping of the manifest, no network; two steps at least after the warm-up.
    """
    manifest = whole.manifest
    data, inner = text_of(manifest), manifest.inner
    line = data.batches("bench", "plain", manifest, Position(data.identity))
    began, steps = time.perf_counter(), -warm_up_steps
    while steps < 2 or time.perf_counter() - began < seconds:
        if steps == 0:
            began = time.perf_counter()
        for _ in range(inner.microbatches):
            batch, _ = next(line)
            whole.passes.last_stage(*batch)
        whole.inner_step(inner.microbatches)  # its norm waits for the device
        steps += 1
    return steps * inner.microbatches * manifest.tokens_per_microbatch / (time.perf_counter() - began)
