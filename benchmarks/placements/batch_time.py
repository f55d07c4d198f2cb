"""Seconds of one batch in DT-FM's setting, microbatch by microbatch: GPipe's schedule, then data parallelism.

Each pipeline runs all forward passes, then all backward passes, on one device for each stage. A link is busy 8c/β
for a microbatch and delivers it α later. With overlap a device computes while its links send and receive; without it
a device stands still while it sends, and takes up the next microbatch only when that has arrived. After the last
backward pass the members of a stage exchange their gradients by eq. 2, and the batch ends with the slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bootstrap.lab.placement.dtfm import data_parallel
from bootstrap.lab.placement.kernels import compiled
from bootstrap.lab.placement.scenario import Scenario

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """A transformer in stages. `sequences` of a batch over all pipelines, one to a microbatch; fp16 on the wire."""

    layers: int = 24
    hidden: int = 2048
    tokens: int = 2048
    vocabulary: int = 50_257
    sequences: int = 1024
    flops: float = 45e12  # of one device while it computes: a V100 at some 40 % of its 112 TFLOPS in fp16

    @property
    def activation_bytes(self) -> float:
        """Of one sequence."""
        return 2.0 * self.tokens * self.hidden

    def work(self) -> float:
        """Floating-point operations of a batch, as papers count: 6 for each weight and token, and attention's."""
        weights = 12 * self.layers * self.hidden**2 + self.vocabulary * self.hidden
        attention = 12 * self.layers * self.hidden * self.tokens
        return float(self.sequences * self.tokens * (6 * weights + attention))


def batch_seconds(
    scenario: Scenario, pipelines: Sequence[Sequence[int]], batch: Batch, overlap: bool
) -> float:
    """Seconds of `batch` with `pipelines` [S][n]: rows are stages in order, columns are pipelines."""
    rows = np.array(pipelines, np.int64)
    stages, replicas = rows.shape
    each = batch.sequences // replicas
    # forward 1, backward 2, and a second forward for recomputation
    forward = batch.work() / batch.sequences / 3 / stages / batch.flops
    occupied = 8 * batch.activation_bytes / scenario.bandwidth
    ends = np.array(
        [
            pipeline_ends(
                np.ascontiguousarray(column), scenario.latency, occupied, each, forward, 3 * forward, overlap
            )
            for column in rows.T
        ]
    )  # [n, S]
    weights = 12 * batch.layers * batch.hidden**2 / stages
    parallel = 2 * scenario.transfer(2 * weights / replicas)
    finished = [ends[:, s].max() + data_parallel(parallel, rows[s]) for s in range(stages)]
    return float(max(finished))


@compiled
def pipeline_ends(
    devices: Integers, latency: Floats, occupied: Floats, microbatches: int, forward: float, backward: float,
    overlap: bool,
) -> Floats:  # fmt: skip
    """[S] seconds until each of `devices` [S] has finished its last backward pass.

    `latency` and `occupied` [N, N] are what a microbatch waits for and holds a link for; `forward` and `backward`
    seconds of compute.
    """
    stages = devices.size
    free = np.zeros(stages)  # when each device can compute again
    arrived = np.zeros(microbatches)
    for s in range(stages):
        link = 0.0
        for m in range(microbatches):
            free[s] = max(free[s], arrived[m]) + forward
            if s + 1 < stages:
                link = max(link, free[s]) + occupied[devices[s], devices[s + 1]]
                arrived[m] = link + latency[devices[s], devices[s + 1]]
                if not overlap:
                    free[s] = link
    arrived[:] = 0.0
    ends = np.zeros(stages)
    for s in range(stages - 1, -1, -1):
        link = 0.0
        for m in range(microbatches):
            free[s] = max(free[s], arrived[m]) + backward
            ends[s] = free[s]
            if s > 0:
                link = max(link, free[s]) + occupied[devices[s], devices[s - 1]]
                arrived[m] = link + latency[devices[s], devices[s - 1]]
                if not overlap:
                    free[s] = link
    return ends
