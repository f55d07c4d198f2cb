"""Compiled loops of the outer step, in either precision: one pass instead of one for each of torch's operations.

As in `protocol.kernels`, arrays are one-dimensional and contiguous; nothing is checked: the caller is `outer`.
"""

from __future__ import annotations

import numpy as np

from protocol.kernels import Floats, compiled


def load() -> None:
    """Compile both for float32 now, or read them from disk, rather than in the middle of a round."""
    one, two, three = (np.zeros(1, np.float32) for _ in range(3))
    number = np.float32(1)
    add_weighted(one, two, number, three, number)
    outer_step(one, two, three, number, number)


@compiled
def add_weighted(target: Floats, first: Floats, a: np.float32, second: Floats, b: np.float32) -> None:
    """target ← target + a·first + b·second."""
    for i in range(target.size):
        target[i] += a * first[i] + b * second[i]


@compiled
def outer_step(phi: Floats, delta: Floats, mean_z: Floats, alpha: np.float32, gamma: np.float32) -> None:
    """δ ← αδ + mean − γφ, φ ← φ + δ."""
    for i in range(phi.size):
        slow = phi[i]
        momentum = mean_z[i] + alpha * delta[i] - gamma * slow
        delta[i] = momentum
        phi[i] = slow + momentum
