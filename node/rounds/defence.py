"""The defence of the average: how far, and which way, one partner may pull this replica. Pure; clock passed in.

Self-centred clipping in the manner of He et al., "Byzantine-robust decentralized learning via ClippedGossip"
(arXiv 2202.01545), with a radius learned from history as in Karimireddy et al., "Learning from history"
(arXiv 2012.10333): whatever a partner j sends, replica i averages with

    z_j' = z_i + f·(z_j − z_i),   f = min(1, (τ/d)²),   d = ‖z_j − z_i‖                 (1)

in each block of parameters by itself (a matrix, or all vectors together), so that an attack on one layer does not
hide in the norm of the whole. f falls with the square: what is kept, τ²/d, is largest at the radius τ and vanishes
for gross outliers, where ClippedGossip keeps τ however far away z_j is.

The radius follows the run: τ = clip · median over recent partners of d / s_i, times s_i = ‖β·Δ_i‖ of this replica.
Δ shrinks and grows with the learning rate, and honest distances with it.

What is clipped is the pull ½(z_j − z_i) of `contribution`. When nothing is, it stays bit for bit and the pair's
mean of φ moves by progress alone. When it is, the sum of the two partners' means differs from z_i + z_j by
(f_i − f_j)(z_j − z_i)/2: nothing when both clip alike, as two honest partners nearly do, who see the same d. Against
an attacker only the own side matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from node.membership.ledger import Ledger
from node.model.flat import Slice
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId

Blocks: TypeAlias = NDArray[np.float64]
Offence: TypeAlias = Literal["far", "opposed", "harmful"]
CHUNK = 2**16  # entries worked on at once, so that they stay in a processor's cache
CHUNK_THERE = (
    2**25
)  # on another device, where each launch costs time: a copy of the progress of so many is 128 MiB
# d/s between replicas that learn nothing in common, α = 0.5, β = γ: √(2(1 + Var φ/s²)) = 2.15 (covariance_recursion).
# What a replica believes in until it has met enough partners.
EXPECTED_RATIO = 2.0
# Who is further away than this many radii, over the whole stage, is reproached with it, unless it is merely behind,
# as one that is slow or was away: then it is far in all directions, not along or against this replica's progress. An
# honest replica three times slower was at up to 4.5, with a cosine within 0.14; attacks ten times Δ at up to 5.3,
# with more than 0.4 in most meetings. That is no excuse twice in a row, nor beyond the gross distance.
FAR = 2.5
BEHIND = 0.25
GROSSLY_FAR = 6.0
EXCUSED = 256  # peers that were far lately, of which that is remembered
# A round in which this replica got nowhere must not shut everybody out: the scale falls to no less than this part of
# itself, which is still faster than a learning-rate schedule. And with far less progress than the scale there is no
# direction to oppose.
SCALE_KEPT = 0.9
LEAST_PROGRESS = 0.25
# The last so many partners count, one vote each however often they were met, and a median follows half of them: it
# keeps up with a run whose distances change within a few rounds, and a minority of attackers cannot move it beyond
# what the honest ones say.
VOTES = 9
LEAST_VOTES = 3  # the expected ratio votes in place of partners not met yet
# A vote counts at most this many limits, so that even a majority can raise the radius only step by step.
GROWTH = 2.0
LEAST_AGREEMENTS = 5
USEFUL_AGREEMENT = 0.2  # with less, honest replicas oppose one another by chance, as late in training
OPPOSITE = -0.5  # of the usual agreement; a flipped Δ has −1
OUTLIER = 4.0  # standard deviations below the usual agreement
DEVIATIONS = 1.4826  # standard deviations of a normal distribution in its median absolute deviation


@dataclass(frozen=True)
class Examination:
    """One look at a partner's contribution."""

    distance: float  # ‖z_j − z_i‖; infinite when it overflows
    radius: float  # allowed for the distance
    agreement: float  # cosine of what the partner would have this replica do and its own progress
    clipped: float  # fraction of the parameters in clipped blocks
    offence: Offence | None
    quarantined: bool  # the peer is, from now on
    loss_change: float | None = (
        None  # in nats per token, of what was left of it; None where that was not tried
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over the entries of each block, [blocks]."""

    squared_distance: Blocks
    squared_progress: Blocks
    product: Blocks  # of difference and progress

    @property
    def agreement(self) -> float:
        """cos(z_j − γφ_i, z_i − γφ_i); 0 where it is undefined."""
        own, product = self.squared_progress.sum(), self.product.sum()
        theirs = own + 2 * product + self.squared_distance.sum()
        if not (math.isfinite(theirs) and math.isfinite(product) and own > 0 and theirs > 0):
            return 0.0
        return float(np.clip((own + product) / math.sqrt(own * theirs), -1.0, 1.0))


def blocks_of(slices: Sequence[Slice], bounds: slice) -> list[slice]:
    """The blocks that are clipped by themselves: each matrix within `bounds`, and all vectors together there.

    They count from the beginning of `bounds`, which may cut a matrix or the vectors.
    """
    matrices, vectors = list[slice](), list[slice]()
    for place in slices:
        start, stop = (
            max(place.start, bounds.start) - bounds.start,
            min(place.stop, bounds.stop) - bounds.start,
        )
        if start < stop:
            (matrices if len(place.shape) >= 2 else vectors).append(slice(start, stop))
    return matrices + ([slice(vectors[0].start, vectors[-1].stop)] if vectors else [])


class Defence:
    """Bounds how far a partner's contribution can pull this replica, from what earlier ones were like.

    `clip` is the radius in medians of past distances, above 0. Offences go into the ledger.
    """

    def __init__(self, blocks: Sequence[slice], clip: float, ledger: Ledger | None = None) -> None:
        self._blocks = list(blocks)
        self._clip = clip
        self._history = PartnerHistory(np.full(len(self._blocks) + 1, EXPECTED_RATIO))
        self._scale: Blocks = np.zeros(len(self._blocks) + 1)  # s of each block and of the whole
        self._far = PeerTable[bool](EXCUSED)  # at the last meeting
        self.ledger = ledger or Ledger()

    @torch.no_grad()
    def examine(
        self, peer: PeerId, pull: torch.Tensor, progress_of: Callable[[slice], torch.Tensor], now: float
    ) -> Examination:
        """Clip `pull`, ½(z_j − z_i), in place to what may be averaged with, and learn from it.

        It is float32 [parameters] and finite; `progress_of` gives any part of the own z_i − γφ_i, on the same
        device. A partner that opposes this replica's progress as none did lately leaves no pull: a group of one.
        """
        sums = self._sums(pull, progress_of)
        progress = _norms(sums.squared_progress)
        scale = self._scale = np.maximum(progress, SCALE_KEPT * self._scale)
        distances = _norms(sums.squared_distance)
        limits = self._clip * self._history.usual_ratios()
        excess = _excess(distances, limits * scale)
        agreement = sums.agreement if progress[-1] > LEAST_PROGRESS * scale[-1] else 0.0
        opposed = agreement < self._history.least_agreement()
        kept = np.zeros(len(self._blocks)) if opposed else np.maximum(1.0, excess[:-1]) ** -2.0
        self._shrink(pull, kept)
        self._history.note(peer, _excess(distances, scale), limits, agreement)
        is_far = self._is_far(peer, excess[-1], agreement)
        offence: Offence | None = "opposed" if opposed else "far" if is_far else None
        return Examination(
            distance=float(distances[-1]),
            radius=float(limits[-1] * scale[-1]),
            agreement=agreement,
            clipped=self._fraction(kept < 1.0),
            offence=offence,
            quarantined=self.ledger.record_meeting(peer, offence is not None, now),
        )

    def _is_far(self, peer: PeerId, excess: float, agreement: float) -> bool:
        """Return whether to reproach `peer` with its distance: not when it is far for once and merely behind."""
        was_far = self._far.pop(peer, False)
        if excess <= FAR:
            return False
        self._far[peer] = True
        return was_far or abs(agreement) > BEHIND or excess > GROSSLY_FAR

    def _sums(self, pull: torch.Tensor, progress_of: Callable[[slice], torch.Tensor]) -> _Sums:
        """The sums of each block. A device is waited for once, at the end."""
        sums = np.zeros((3, len(self._blocks)))
        size = CHUNK if pull.device.type == "cpu" else CHUNK_THERE
        parts = [(index, part) for index, block in enumerate(self._blocks) for part in _chunks(block, size)]
        found = [_dots(pull[part], progress_of(part)) for _, part in parts]
        for (index, _), three in zip(parts, torch.stack(found).cpu().numpy(), strict=True):
            sums[:, index] += three
        return _Sums(4 * sums[0], sums[1], 2 * sums[2])

    def _shrink(self, pull: torch.Tensor, kept: Blocks) -> None:
        """Eq. (1) in place, with f = `kept` [blocks]."""
        for block, factor in zip(self._blocks, kept.tolist(), strict=True):
            if factor < 1.0:
                pull[block].mul_(factor)

    def _fraction(self, chosen: NDArray[np.bool_]) -> float:
        sizes = np.array([block.stop - block.start for block in self._blocks])
        return float(sizes[chosen].sum() / sizes.sum())


class PartnerHistory:
    """Distances, in units of own progress, and agreement of recent partners."""

    def __init__(self, expected: NDArray[np.float64]) -> None:
        self._expected = expected
        self._votes = PeerTable[tuple[NDArray[np.float64], float]](VOTES)

    def usual_ratios(self) -> NDArray[np.float64]:
        """Median of the votes of each block, as long as `expected`."""
        votes = [ratios for ratios, _ in self._votes.values()]
        votes += [self._expected] * (LEAST_VOTES - len(votes))
        median: NDArray[np.float64] = np.median(np.stack(votes), axis=0)
        return median

    def least_agreement(self) -> float:
        """The agreement below which a partner is opposed: it wants the opposite of the others, and is an outlier."""
        agreements = np.array([agreement for _, agreement in self._votes.values()])
        if len(agreements) < LEAST_AGREEMENTS or np.median(agreements) < USEFUL_AGREEMENT:
            return -np.inf
        median = np.median(agreements)
        deviation = DEVIATIONS * np.median(np.abs(agreements - median))
        return float(min(OPPOSITE * median, median - OUTLIER * deviation))

    def note(
        self, peer: PeerId, ratios: NDArray[np.float64], limits: NDArray[np.float64], agreement: float
    ) -> None:
        """Note a meeting: distances by own progress, what was allowed of them, and the cosine."""
        self._votes[peer] = np.minimum(ratios, GROWTH * limits), agreement


def _norms(squares: Blocks) -> Blocks:
    """Norms of each block and, last, of the whole, from sums of squares."""
    norms: Blocks = np.sqrt(np.append(squares, squares.sum()))
    return norms


def _excess(distances: Blocks, radii: Blocks) -> Blocks:
    """distance / radius; 0 for no distance, infinite for a radius of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distances > 0, distances / radii, 0.0)


def _chunks(block: slice, size: int) -> Iterator[slice]:
    for start in range(block.start, block.stop, size):
        yield slice(start, min(start + size, block.stop))


def _dots(half: torch.Tensor, progress: torch.Tensor) -> torch.Tensor:
    """The products of both with themselves and with each other, [3]."""
    pairs = ((half, half), (progress, progress), (half, progress))
    return torch.stack([torch.dot(*pair) for pair in pairs])
