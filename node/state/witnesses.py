"""Checks that a donor's state can be a replica's, and is like that of the stage's others. Pure but for the asking.

Replicas of a stage differ, so no digest can tell. Others, the witnesses, are asked what they hold at random positions
of a piece, drawn once it is here, and the donor must be about as near to the median of all as they are. With the
donor there are three to six to compare; liars that are fewer than half of them neither pass nor throw an honest donor
out. What passes may still be a few rounds' movement away from the others, as honest replicas are.

AdamW bounds its moments itself. With gradients g, Cauchy and Schwarz for m = (1 − β₁)·Σ β₁ⁱ·g and
v = (1 − β₂)·Σ β₂ⁱ·g² say

    m² ≤ v · (1 − β₁)² / ((1 − β₂)·(1 − β₁²/β₂))                                              (1)

whatever the gradients were, so no donor can make a newcomer take steps without measure.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

import torch

from node.model.inner import learning_rate
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.state import MOST_POSITIONS, GetStateSample, StateSample
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Inner
from protocol.supervision import all_of

logger = logging.getLogger(__name__)

SAMPLE_DEADLINE = 10.0
MOST_WITNESSES = 5
FEWEST = 3  # donor and witnesses: of two that differ nobody knows which one lies
# Of five replicas of tests/swarm's model at any time, one is at most 2.1 median distances from the median of all.
# Two are at most 2.4 of their last outer steps from each other: what is left when liars make the median distance
# nothing, with copies of an honest one.
SPREADS = 2.0
MOVES = 3.0
MOST_ROUNDS_APART = 4  # so many outer steps more, where the donor's round is another
# Inner steps that a weight moves by when a single batch was about it: with rare tokens a donor may be the only one.
FEW_STEPS = 10
ROUNDING = 1e-5  # of the weights: what a device's float32 may be off, and of (1)
LARGER = 2.0  # than the others' largest weight is none of an honest donor's
LOOSE = 10.0  # δ and the moments are those of a few batches: their size alone is compared


@dataclass(frozen=True)
class Sample:
    """A replica's values at some positions of a piece, and how far it is."""

    step: int
    round: int
    phi: torch.Tensor  # float64 [positions]
    sizes: tuple[float, ...]  # root mean squares at the positions of δ, AdamW's first moment, √ of its second
    largest: tuple[float, ...]  # in the whole piece: |φ| and |δ|


def sample_of(tensors: Sequence[torch.Tensor], positions: Sequence[int], step: int, round_: int) -> Sample:
    """A sample of a piece's φ, or of φ, δ and AdamW's moments, each [entries]; the positions are within."""
    chosen = torch.tensor(positions)
    phi, *others = (tensor[chosen].double() for tensor in tensors)
    roots = (other.abs().sqrt() if place == 2 else other for place, other in enumerate(others))
    largest = tuple(float(tensor.abs().max()) for tensor in tensors[:2])
    return Sample(step, round_, phi, tuple(map(_size, roots)), largest)


def are_possible(first: torch.Tensor, second: torch.Tensor, inner: Inner, muons: slice = slice(0, 0)) -> bool:
    """Return whether the optimizer can have made these moments of a piece, of gradients clipped over the stage.

    See (1); of the entries `muons` the first is Muon's momentum, a mean of gradients, and the second is not used.
    """
    momentum = torch.linalg.vector_norm(first[muons], dtype=torch.float64)
    if momentum > (1 + ROUNDING) * inner.clip_norm or second[muons].any():
        return False
    first, second = (torch.cat([of[: muons.start], of[muons.stop :]]) for of in (first, second))
    return _are_adamws(first, second, inner)


def _are_adamws(first: torch.Tensor, second: torch.Tensor, inner: Inner) -> bool:
    if not len(first):
        return True
    if second.min() < 0 or second.sum(dtype=torch.float64) > (1 + ROUNDING) * inner.clip_norm**2:
        return False
    ratio = inner.beta1**2 / inner.beta2 if inner.beta2 else math.inf
    if ratio >= 1:
        return True
    most = (1 - inner.beta1) / math.sqrt((1 - inner.beta2) * (1 - ratio))
    return bool((first.abs() <= (1 + 1e-3) * most * second.sqrt() + inner.eps).all())


def why_unlike(donor: Sample, witnesses: Sequence[Sample], inner: Inner, parameters: int) -> str:
    """A clause for the volunteer, empty when the donor's state may be that of a replica of this stage.

    With the donor they are at least `FEWEST`. It counts among them, so that three honest ones of five are most.
    """
    said = [donor, *witnesses]
    rate = FEW_STEPS * learning_rate(inner, median_high(one.step for one in said))
    gradient = inner.clip_norm / math.sqrt(parameters)
    delta, *moments = _medians([one.sizes for one in said])
    phi = torch.stack([one.phi for one in said])
    middle = phi.median(0).values
    distances = [_size(values - middle) for values in phi]
    apart = min(MOST_ROUNDS_APART, abs(donor.round - median_high(one.round for one in said)))
    tolerated = SPREADS * median_high(distances) + (MOVES + apart) * delta + rate + ROUNDING * _size(middle)
    if distances[0] > tolerated:
        return f"its weights are {distances[0]:.2g} from theirs, where {tolerated:.2g} may be"
    weight, largest_delta = _medians([one.largest for one in said])
    if donor.largest[0] > LARGER * weight + tolerated:
        return f"it has a weight of {donor.largest[0]:.2g}, where theirs go to {weight:.2g}"
    told = [*donor.sizes, *donor.largest[1:]]
    usual = [max(delta, rate), *(max(size, gradient) for size in moments), max(largest_delta, rate)]
    if any(size > LOOSE * most for size, most in zip(told, usual, strict=False)):
        return "its momentum is far larger than theirs"
    return ""


def _size(values: torch.Tensor) -> float:
    """Root mean square."""
    return float(values.square().mean().sqrt())


def _medians(said: Sequence[Sequence[float]]) -> list[float]:
    """Place by place, over those that told."""
    longest = max(map(len, said))
    return [median_high(one[place] for one in said if len(one) > place) for place in range(longest)]


# --- asking -------------------------------------------------------------------------------------


class Unlike(NolocoError):
    """A donor's state is not that of a replica of the stage; the text says why."""


@dataclass(frozen=True)
class DonatedPiece:
    """A piece as a donor gave it: φ, or φ, δ and AdamW's moments, of a stage with so many parameters."""

    stage: int
    parameters: int
    index: int
    tensors: Sequence[torch.Tensor]
    step: int
    round: int


async def compared(
    rpc: Rpc, claim: DonatedPiece, witnesses: Sequence[PeerId], inner: Inner, rng: random.Random
) -> dict[PeerId, Sample | None]:
    """Ask what each witness holds there; None where there is no good answer within `SAMPLE_DEADLINE`.

    Raises `Unlike` when the claim is not like that. Fewer than `FEWEST` with the donor cannot tell: it stands. `rng`
    must be one that peers cannot guess.
    """
    size = len(claim.tensors[0])
    positions = rng.sample(range(size), min(MOST_POSITIONS, size))
    request = GetStateSample(stage=claim.stage, index=claim.index, positions=positions)
    answers = await all_of(*(_ask(rpc, request, peer) for peer in witnesses))
    samples = [answer for answer in answers if answer is not None]
    if len(samples) + 1 >= FEWEST:
        donor = sample_of(claim.tensors, positions, claim.step, claim.round)
        if why := why_unlike(donor, samples, inner, claim.parameters):
            raise Unlike(why)
    return dict(zip(witnesses, answers, strict=True))


async def _ask(rpc: Rpc, request: GetStateSample, peer: PeerId) -> Sample | None:
    try:
        return await rpc.call_and_read(peer, request, deadline=SAMPLE_DEADLINE, read=_read)
    except NolocoError as failure:
        logger.debug("No sample from %s: %s", peer[-8:], failure)
        return None


def _read(told: StateSample, tensors: Sequence[torch.Tensor]) -> Sample:
    return Sample(told.step, told.round, tensors[0].double(), tuple(told.sizes), tuple(told.largest))
