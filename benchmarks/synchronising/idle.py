"""How long replicas stand still in a round of k inner steps: all together, or each with one partner.

An inner step's compute time is log-normal with a relative standard deviation `variation`, independent between
steps and replicas. A round of k of them is taken as log-normal with their sum's mean and variance (Fenton and
Wilkinson's approximation). Replicas are equally fast on average: one that is always slow holds up everybody it
waits for, under every scheme, and is not modelled here.

Four ways to end a round:

- all-reduce: everybody waits for the slowest replica, then for the all-reduce;
- pair, one round: both started together; the faster waits for the slower, then both exchange;
- pair, round after round: partners are drawn again for each round, as in the paper's public code. Whoever waited
  makes its next partner wait, so this is more than one round shows, but it stops growing with N;
- pair, training on: the faster replica goes on training until the slower is ready (`outer.window`), so that only
  the exchange itself blocks. Whoever hides that behind compute (`outer.overlap`) does not even wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .sync_times import SyncTimes, slowest_of

SETTLING_ROUNDS = 64  # until the replicas' clocks have spread as far as they will, N up to 16,384
MEASURED_ROUNDS = 64
CLOCKS = 2**12  # replicas times independent swarms followed at once


@dataclass(frozen=True)
class Round:
    """k inner steps of `step` each, in median one-way messages; `variation`: relative deviation of a step."""

    inner_steps: int
    step: float
    variation: float

    @property
    def mean(self) -> float:
        return self.inner_steps * self.step

    @property
    def sigma(self) -> float:
        """Of the logarithm of a round's compute time."""
        return math.sqrt(math.log1p(self.variation**2 / self.inner_steps))

    def slowest(self, count: int) -> float:
        """E of the largest of `count` rounds' compute times."""
        return self.mean * math.exp(-(self.sigma**2) / 2) * slowest_of(count, self.sigma)


@dataclass(frozen=True)
class Blocked:
    """Fraction of its time that a replica spends waiting or exchanging."""

    all_reduce: float
    pair_one_round: float
    pair_every_round: float
    pair_training_on: float


def blocked(
    replicas: int,
    rounds: Round,
    sync: SyncTimes,
    sigma: float,
    transfer: float,
    generator: np.random.Generator,
) -> Blocked:
    """For `replicas` ≥ 2 whose messages vary with `sigma`. The all-reduce is the faster of tree and ring."""

    def share(duration: float) -> float:
        return 1 - rounds.mean / duration

    return Blocked(
        all_reduce=share(rounds.slowest(replicas) + min(sync.tree, sync.ring)),
        pair_one_round=share(rounds.slowest(2) + sync.pair_at_once),
        pair_every_round=share(_round_after_round(replicas, rounds, sigma, transfer, generator)),
        pair_training_on=share(rounds.mean + sync.pair_at_once),
    )


def _round_after_round(
    replicas: int, rounds: Round, sigma: float, transfer: float, generator: np.random.Generator
) -> float:
    """Mean duration of a round in the long run when each round has its own, uniformly random pairs.

    With an odd number one replica is alone in each round.
    """
    swarms, paired = max(1, CLOCKS // replicas), replicas - replicas % 2
    clock = np.zeros((swarms, replicas))
    settled = 0.0
    for number in range(SETTLING_ROUNDS + MEASURED_ROUNDS):
        if number == SETTLING_ROUNDS:
            settled = float(clock.mean())
        spread = generator.standard_normal(clock.shape)
        clock += rounds.mean * np.exp(rounds.sigma * spread - rounds.sigma**2 / 2)
        # replicas are interchangeable: shuffling them and pairing neighbours draws the pairs
        clock = generator.permuted(clock, axis=1)
        messages = np.exp(sigma * generator.standard_normal((swarms, paired // 2, 2)))
        met = clock[:, :paired].reshape(swarms, -1, 2).max(2) + messages.max(2) + transfer
        clock[:, :paired] = np.repeat(met, 2, axis=1)
    return (float(clock.mean()) - settled) / MEASURED_ROUNDS
