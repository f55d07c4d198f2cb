"""How far the replicas of a stage really are from each other: all their slow weights side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bootstrap.inspect.observer import Observer
from node.model.stage import parameter_count
from node.state.transfer import fetch_slow_weights


async def measure_spread(observer: Observer) -> float:
    """Root mean squared deviation of φ from its mean, over the replicas and parameters of all stages.

    Fetches every replica's state: for small models and swarms. Raises `JoinError` when one goes away.
    """
    squares, entries = 0.0, 0
    for stage in range(observer.manifest.stages):
        parameters = parameter_count(observer.manifest, stage)
        replicas = [
            (await fetch_slow_weights(observer.rpc, stage, parameters, peer))[0]
            for peer in observer.view.holding(stage, observer.transport.now())
        ]
        squares += squared_deviation(replicas)
        entries += sum(replica.numel() for replica in replicas)
    return math.sqrt(squares / entries) if entries else 0.0


def squared_deviation(replicas: Sequence[torch.Tensor]) -> float:
    """Sum over replicas and parameters of the squared difference to the replicas' mean."""
    if not replicas:
        return 0.0
    mean = torch.stack(list(replicas)).double().mean(0)
    return float(sum((replica.double() - mean).square().sum() for replica in replicas))
