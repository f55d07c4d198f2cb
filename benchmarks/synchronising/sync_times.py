"""How long synchronising takes: tree and ring all-reduce against the exchange of a pair, over N replicas.

The model of arXiv 2506.10911, section on latency: a message takes exp(σZ) with Z standard normal, in units of
the median one-way message; σ = 0 is a network without variation. A link moves one state at a time, in
`transfer` of these units. All replicas start together; the time is that of the last one to finish.

| scheme | messages in a row | states over a link |
|---|---|---|
| tree (binomial; reduce, then broadcast) | 2·⌊log2 N⌋ | 2·⌈log2 N⌉ |
| ring | 2(N − 1) | 2(N − 1)/N |
| pair through one of the two, as in the paper's public code | 2 | 2 |
| pair, both at once, as here | 1, the slower of two | 1 |

A tree's state is passed on whole, level by level. Cutting it into pieces that follow each other down the tree
would bring its states over a link to about 2, for as many more messages; that is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

DRAWS_AT_ONCE = 2**22  # message times in memory: 32 MiB
RING_DRAWS = 2**22  # a ring's 2N² messages are the costly part; it varies little, so few samples do
PAIR_SAMPLES = 100_000  # at least; a pair's messages cost next to nothing
# A longer ring goes on as the second half of this many messages in a row among this many replicas did: within
# 2 % of the whole simulation at N = 1024 and 2048, for σ up to 1.
RING_MESSAGES, RING_REPLICAS = 1024, 512
GRID = 2**17  # points of a distribution; 16 times as many change a mean by 0.06 % at most, σ up to 2


@dataclass(frozen=True)
class SyncTimes:
    """Until the last replica has finished, in median one-way messages. `error`: standard error of `tree`."""

    tree: float
    ring: float
    pair_via_one: float
    pair_at_once: float
    slowest_pair: float  # the last of all pairs, both at once: for who waits for everyone
    error: float = 0.0


def simulate_sync(
    replicas: int, sigma: float, samples: int, generator: np.random.Generator, transfer: float = 0.0
) -> SyncTimes:
    """Means over `samples` independent synchronisations of `replicas` ≥ 2; see the table above."""
    tree = np.concatenate([_tree(replicas, sigma, part, generator) for part in _parts(samples, replicas)])
    slowest = [
        _messages(sigma, (part, replicas - replicas % 2), generator).max(1)
        for part in _parts(samples, replicas)
    ]
    one, other = _messages(sigma, (2, max(samples, PAIR_SAMPLES)), generator)
    return _with_transfer(
        replicas,
        transfer,
        tree=float(tree.mean()),
        ring=_ring(replicas, sigma, samples, generator),
        pair_via_one=float((one + other).mean()),
        pair_at_once=float(np.maximum(one, other).mean()),
        slowest_pair=float(np.concatenate(slowest).mean()),
        error=float(tree.std()) / math.sqrt(samples),
    )


def expected_sync(sizes: list[int], sigma: float, transfer: float = 0.0) -> dict[int, SyncTimes]:
    """The same means without sampling, for each number of replicas; a ring has none for σ > 0 and gets NaN."""
    trees = _expected_trees(sizes, sigma)
    return {
        n: _with_transfer(
            n,
            transfer,
            tree=trees[n],
            ring=math.nan if sigma else 2.0 * (n - 1),
            pair_via_one=2 * mean_message(sigma),
            pair_at_once=slower_of_two(sigma),
            slowest_pair=slowest_of(n - n % 2, sigma),
        )
        for n in sizes
    }


def levels(replicas: int) -> int:
    """Levels of a binomial tree over `replicas`: ⌈log2 N⌉."""
    return (replicas - 1).bit_length()


def mean_message(sigma: float) -> float:
    """E[exp(σZ)]."""
    return math.exp(sigma**2 / 2)


def slower_of_two(sigma: float) -> float:
    """E[max of two independent exp(σZ)] = 2·exp(σ²/2)·Φ(σ/√2); Φ is the normal distribution function."""
    return 2 * mean_message(sigma) * _normal_cdf(sigma / math.sqrt(2))


def slowest_of(count: int, sigma: float) -> float:
    """E[max of `count` independent exp(σZ)], by quadrature of exp(σz) over the density of the largest z."""
    z = np.linspace(-10.0, 12.0 + sigma, 20_001)
    cdf = _normal_cdfs(z)
    density = count * cdf ** (count - 1) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return float(np.trapezoid(np.exp(sigma * z) * density, z))


def _with_transfer(replicas: int, transfer: float, error: float = 0.0, **latencies: float) -> SyncTimes:
    """Add the time that the bytes take: constant, since a link moves one state after the other."""
    states = {
        "tree": 2.0 * levels(replicas),
        "ring": 2 * (replicas - 1) / replicas,
        "pair_via_one": 2.0,
        "pair_at_once": 1.0,
        "slowest_pair": 1.0,
    }
    return SyncTimes(
        **{name: value + states[name] * transfer for name, value in latencies.items()}, error=error
    )


def _parts(samples: int, replicas: int) -> Iterator[int]:
    at_once = max(1, DRAWS_AT_ONCE // replicas)
    for first in range(0, samples, at_once):
        yield min(at_once, samples - first)


def _messages(sigma: float, shape: tuple[int, ...], generator: np.random.Generator) -> Times:
    times: Times = np.exp(sigma * generator.standard_normal(shape))
    return times


def _tree(replicas: int, sigma: float, samples: int, generator: np.random.Generator) -> Times:
    """[samples]: every second member of a level sends to the one before it, and later hears from it."""
    ready = np.zeros((samples, replicas))
    sizes = [replicas]
    while ready.shape[1] > 1:
        kept, sent = ready[:, ::2], ready[:, 1::2]
        ready = kept.copy()
        arrived = sent + _messages(sigma, sent.shape, generator)
        ready[:, : sent.shape[1]] = np.maximum(kept[:, : sent.shape[1]], arrived)
        sizes.append(ready.shape[1])
    for size in reversed(sizes[:-1]):
        told = ready[:, : size - ready.shape[1]]
        below = np.empty((samples, size))
        below[:, ::2], below[:, 1::2] = ready, told + _messages(sigma, told.shape, generator)
        ready = below
    last: Times = ready.max(1)
    return last


def _ring(replicas: int, sigma: float, samples: int, generator: np.random.Generator) -> float:
    """Mean time of 2(N − 1) messages in a row; a replica passes on what it has heard from the one before."""
    messages = 2 * (replicas - 1)
    if sigma == 0:
        return float(messages)
    width, simulated = min(replicas, RING_REPLICAS), min(messages, RING_MESSAGES)
    ready = np.zeros((max(2, min(samples, RING_DRAWS // (width * simulated))), width))
    half = 0.0
    for message in range(simulated):
        if message == simulated // 2:
            half = float(ready.max(1).mean())
        arrived = np.roll(ready + _messages(sigma, ready.shape, generator), 1, axis=1)
        ready = np.maximum(ready, arrived)
    end = float(ready.max(1).mean())
    return end + (end - half) / (simulated - simulated // 2) * (messages - simulated)


def _expected_trees(sizes: list[int], sigma: float) -> dict[int, float]:
    """E of the tree's time, from the distribution F_n of a broadcast to n replicas.

    The half that keeps the message, a replicas, goes on at once, the other b after a message with density f:
    F_n = F_a · (F_b ∗ f), with a the largest power of two below n. The reduction is the broadcast backwards in
    time, so it takes as long on average.
    """
    # a path of ⌈log2 N⌉ messages and the largest of some 10^5 of them, beyond which 1e-6 of the mass lies
    longest = 2 + levels(max(sizes)) * mean_message(sigma) + 1.5 * math.exp(6.5 * sigma)
    step = 1 / max(1, int(GRID / longest))  # 1 is a point of the grid: σ = 0 is exact
    upper = (np.arange(GRID) + 0.5) * step
    at_most = (upper >= 1) * 1.0 if sigma == 0 else _normal_cdfs(np.log(upper) / sigma)
    message = np.fft.rfft(np.diff(at_most, prepend=0.0), 2 * GRID)
    known = {1: np.ones(GRID)}

    def finished(n: int) -> Times:
        if n not in known:
            kept = 1 << (levels(n) - 1)
            told = np.diff(finished(n - kept), prepend=0.0)
            later = np.cumsum(np.fft.irfft(np.fft.rfft(told, 2 * GRID) * message)[:GRID])
            known[n] = finished(kept) * np.clip(later, 0.0, 1.0)
        return known[n]

    return {n: 2 * step * float((1 - finished(n)).sum()) for n in sizes}


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _normal_cdfs(z: Times) -> Times:
    return np.fromiter((_normal_cdf(value) for value in z), np.float64, len(z))
