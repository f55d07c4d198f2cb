"""Clusters of near devices: hundreds of devices as a few dozen.

Moving one device out of a group of 32 that fit together costs what only moving all of them would gain. Among
clusters of near devices the same placement is a few swaps away; swaps of single devices then refine it.
"""

from __future__ import annotations

import numpy as np

from bootstrap.lab.placement.kernels import Floats, Integers

MAX_CLUSTERS = 96  # for DT-FM's cost: more, and single changes are too small a step again
MAX_CHEAP_CLUSTERS = 256  # for NoLoCo's, of which more changes can be tried


def cluster_size(devices: int, replicas: int, most: int = MAX_CLUSTERS) -> int:
    """The least size that divides `replicas` and leaves at most so many; 1 when none does or need be."""
    sizes = [size for size in range(1, replicas + 1) if replicas % size == 0]
    return next((size for size in sizes if devices // size <= most), 1)


def clusters(weights: Floats, size: int, generator: np.random.Generator) -> Integers:
    """[N/size, size] devices: each cluster a random device and the nearest to it that are left."""
    free = generator.permutation(len(weights)).tolist()
    found = []
    while free:
        first = free.pop()
        nearest = sorted(free, key=lambda device: weights[first, device])[: size - 1]
        free = [device for device in free if device not in nearest]
        found.append([first, *nearest])
    return np.array(found, np.int64)


def block_means(times: Floats, members: Integers) -> Floats:
    """[C, C] mean of `times` [N, N] between the members [C, m] of two clusters, or inside one."""
    count, size = members.shape
    order = members.ravel()
    means: Floats = times[order][:, order].reshape(count, size, count, size).mean((1, 3))
    return means
