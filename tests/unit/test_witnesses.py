"""Five replicas of a stage, two of which may say anything: no lie passes, and no honest donor is thrown out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.model.inner import InnerOptimizer
from node.model.replica import Replica
from node.state.witnesses import Sample, are_possible, sample_of, why_unlike
from tests.swarm.micro import micro_manifest

MANIFEST = micro_manifest(inner__total_steps=1_000, inner__learning_rate=1e-4, inner__min_learning_rate=1e-5)
INNER, PARAMETERS, POSITIONS = MANIFEST.inner, 10**6, 256
WEIGHT, STEP, ROUND = 0.05, 500, 100
GRADIENT = INNER.clip_norm / math.sqrt(PARAMETERS)


def why(donor: Sample, witnesses: list[Sample]) -> str:
    return why_unlike(donor, witnesses, INNER, PARAMETERS)


def honest(seed: int, count: int, spread: float, moves: float) -> list[Sample]:
    """Replicas that differ by `spread`, each a bit otherwise far, after outer steps of about `moves`."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0, WEIGHT, POSITIONS)
    found = []
    for _ in range(count):
        phi = torch.from_numpy(common + rng.normal(0, spread * rng.uniform(0.6, 1.4), POSITIONS))
        sizes = tuple(float(size * rng.uniform(0.5, 2)) for size in (moves, GRADIENT, GRADIENT))
        largest = (float(phi.abs().max()), 5 * sizes[0])
        step, round_ = STEP + int(rng.integers(-10, 10)), ROUND + int(rng.integers(-2, 3))
        found.append(Sample(step, round_, phi, sizes, largest))
    return found


def seen(sample: Sample, phi: torch.Tensor) -> Sample:
    return replace(sample, phi=phi, largest=(float(phi.abs().max()), sample.largest[1]))


Lie = Callable[[Sample, torch.Tensor], Sample]  # what an honest one says, and noise
LIES: dict[str, Lie] = {
    "noise": lambda one, noise: seen(one, noise),
    "noise of a weight's size": lambda one, noise: seen(one, WEIGHT * noise),
    "scaled": lambda one, noise: seen(one, 3 * one.phi),
    "flipped": lambda one, noise: seen(one, -one.phi),
    "in a tenth": lambda one, noise: seen(
        one, torch.where(torch.arange(POSITIONS) % 10 == 3, noise, one.phi)
    ),
    "zero": lambda one, noise: seen(one, torch.zeros(POSITIONS)),
    "huge": lambda one, noise: seen(one, 1e38 * noise),
    "elsewhere in the piece": lambda one, noise: replace(one, largest=(1e3, one.largest[1])),
    "δ": lambda one, noise: replace(one, sizes=(1.0, *one.sizes[1:])),
    "first moment": lambda one, noise: replace(one, sizes=(one.sizes[0], 1.0, one.sizes[2])),
    "δ elsewhere": lambda one, noise: replace(one, largest=(one.largest[0], 10.0)),
}
spreads = st.floats(0, 2e-3)
moved = st.floats(5e-4, 1e-3)
seeds = st.integers(0, 2**31)


@given(seed=seeds, spread=spreads, moves=moved, count=st.integers(3, 6))
def test_honest_replicas_are_like_each_other(seed: int, spread: float, moves: float, count: int) -> None:
    said = honest(seed, count, spread, moves)
    for place, donor in enumerate(said):
        assert not why(donor, said[:place] + said[place + 1 :])


@pytest.mark.parametrize("name", LIES)
@given(seed=seeds, spread=spreads, moves=moved, colludes=st.booleans())
def test_a_lie_is_found_out_whether_or_not_a_witness_swears_to_it(
    name: str, seed: int, spread: float, moves: float, colludes: bool
) -> None:
    said = honest(seed, 5, spread, moves)
    noise = torch.from_numpy(np.random.default_rng(seed + 1).normal(0, 1, POSITIONS))
    lying = [LIES[name](one, noise) for one in said[:2]]
    if colludes:
        lying = [lying[0], lying[0]]
    assert why(lying[0], [lying[1], *said[2:]])
    assert why(lying[0], said[1:]), "alone"
    assert why(lying[0], said[1:3]), "alone among three"
    for donor in (2, 3, 4):
        others = [said[place] for place in (2, 3, 4) if place != donor]
        assert not why(said[donor], [*lying, *others]), "and throws out nobody honest"


def copy_of_one(said: list[Sample]) -> list[Sample]:
    """Three are equal then, and the distance to their median is nothing."""
    return [said[2], said[2]]


def smaller(said: list[Sample]) -> list[Sample]:
    """As if replicas never moved, nor had momentum."""
    still = replace(said[2], sizes=(0.0, 0.0, 0.0), largest=(0.0, 0.0))
    return [still, still]


def at_the_edges(said: list[Sample]) -> list[Sample]:
    """To both sides of the honest ones, so that the median may be any of them."""
    phi = torch.stack([one.phi for one in said[2:]])
    return [seen(said[0], phi.min(0).values), seen(said[1], phi.max(0).values)]


@pytest.mark.parametrize("plot", [copy_of_one, smaller, at_the_edges])
@given(seed=seeds, spread=st.floats(0, 1.1e-3), moves=moved)
def test_two_witnesses_cannot_throw_out_an_honest_donor(
    plot: Callable[[list[Sample]], list[Sample]], seed: int, spread: float, moves: float
) -> None:
    """Where honest ones are up to two outer steps from each other."""
    said = honest(seed, 5, min(spread, moves), moves)
    lying = plot(said)
    for donor in (2, 3, 4):
        others = [said[place] for place in (2, 3, 4) if place != donor]
        assert not why(said[donor], [*lying, *others])


def test_who_is_a_round_ahead_is_as_far_as_that_away() -> None:
    said = honest(1, 5, 1e-5, 1e-3)
    ahead = replace(seen(said[0], said[0].phi + 5e-3), round=ROUND + 4, step=STEP + 20)
    assert not why(ahead, said[1:])
    assert why(replace(ahead, round=ROUND), said[1:])
    assert why(replace(seen(ahead, said[0].phi + 0.1), round=10**9), said[1:])


def test_who_alone_met_a_rare_token_is_honest() -> None:
    """The others have not moved there at all: their rows never had a gradient."""
    still = Sample(STEP, ROUND, torch.full((POSITIONS,), 0.02, dtype=torch.float64), (0.0,) * 3, (0.02, 0.0))
    rate = INNER.learning_rate
    phi = still.phi.clone()
    phi[:32] += 5 * rate
    donor = Sample(STEP, ROUND, phi, (2 * rate, GRADIENT, GRADIENT), (float(phi.max()), 5 * rate))
    assert not why(donor, [still] * 4)


def test_what_replicas_do_not_tell_is_not_compared() -> None:
    """For an export φ alone is fetched."""
    donor, *witnesses = honest(1, 5, 1e-4, 1e-3)
    alone = replace(donor, sizes=(), largest=donor.largest[:1])
    assert not why(alone, witnesses)
    assert why(seen(replace(alone, largest=(1.0, 0.0)), -donor.phi), witnesses)


def test_a_sample_is_of_the_positions_but_for_what_is_largest() -> None:
    phi, delta, first, second = (torch.tensor([1.0, -2.0, 9.0]), torch.tensor([3.0, 4.0, -7.0]),
                                 torch.tensor([1.0, -1.0, 5.0]), torch.tensor([4.0, 16.0, 99.0]))  # fmt: skip
    sample = sample_of([phi, delta, first, second], [0, 1], 5, 1)
    assert sample.phi.tolist() == [1.0, -2.0]
    assert sample.sizes == pytest.approx((12.5**0.5, 1.0, 10**0.5))
    assert sample.largest == (9.0, 7.0)
    assert sample_of([phi], [2], 5, 1).sizes == ()


# --- what AdamW cannot have made ------------------------------------------------------------------


@given(seed=seeds, beta1=st.sampled_from([0.0, 0.9, 0.99]), beta2=st.sampled_from([0.0, 0.95, 0.99, 0.999]))
def test_moments_that_adamw_made_are_possible(seed: int, beta1: float, beta2: float) -> None:
    """Gradients that come seldom, grow, or keep their sign, as the worst do, and are clipped."""
    manifest = micro_manifest(inner__beta1=beta1, inner__beta2=beta2)
    inner, replica = manifest.inner, Replica(manifest, 0)
    rng = np.random.default_rng(seed)
    growth, share = rng.uniform(0.5, 2), rng.uniform(0.01, 1)
    optimizer: InnerOptimizer = replica.optimizer
    gradients = replica.flat.gradients
    for step in range(15):
        found = torch.from_numpy(rng.normal(0.5, 1, len(gradients)) * (rng.random(len(gradients)) < share))
        gradients.copy_(found * growth**step)
        gradients.mul_(min(1.0, inner.clip_norm / max(1e-30, float(gradients.norm()))))
        optimizer.update(1e-3)
    assert are_possible(*optimizer.moments, inner)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0.01] * 4, [0.0] * 4),
        ([0.01, 0, 0, 0], [1e-12, 1, 0, 0]),
        ([0.0] * 4, [-1e-9, 0, 0, 0]),
        ([0.0] * 4, [1.0] * 4),
    ],
)
def test_moments_that_would_carry_a_newcomer_away_are_none(first: list[float], second: list[float]) -> None:
    assert not are_possible(torch.tensor(first), torch.tensor(second), INNER)
