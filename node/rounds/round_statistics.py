"""Learns from a meeting with a partner: how far apart replicas are, how far they should be, and whom to believe.

How far they should be is what `node.model.outer.covariance_recursion` says, fed with the noise s² of each round's
progress as the pair shows it: for independent noise E‖Δ_i − Δ_j‖²/P = 2·s².

How far they are a replica knows of one pair at a time, as it was before the outer step. While a run begins, or its
learning rate falls, distances of past meetings are not those of now. Each counts as a multiple of what was expected,

    σ² now ≈ Σ measured / Σ expected · expected now,   over the last meetings

so that the theory gives the course and the meetings the height, with all that the theory does not know: codecs,
clipping, rounds of different lengths, gradients that agree. That is how far replicas are on average. In a stage of
three or four the distance of the moment is often half or twice that, as who met last; who wants it asks all of them
(`sampled_spreads` in bootstrap/inspect/observer.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from node.context import Context
from node.model.fragment import EVERYTHING, Fragment
from node.model.outer import Matrix, OuterSettings, covariance_recursion, stationary_covariance
from node.rounds.defence import Defence, Examination, blocks_of
from node.rounds.effect import Effect
from node.rounds.gain import cosine
from node.rounds.pull import Pull
from protocol.ground import PeerId

logger = logging.getLogger(__name__)
SETTLED_ROUND = 20  # a replica that begins beyond it came to a stage whose spread was already there
DISTANCES = 8  # pair distances behind the estimate


@dataclass(frozen=True)
class MeetingSample:
    """One meeting: mean squares over a sample of the parameters, and what the defence found."""

    squared_distance: float  # of φ_i − φ_j
    squared_difference: float  # of Δ_i − Δ_j, in units of the own gain
    shared: float  # the cosine of Δ_i and Δ_j
    finding: Examination | None


class RoundStatistics:
    """Estimates and predicts the spread of replicas in a fragment, and applies the defence to each exchange of it."""

    def __init__(self, context: Context, own: Fragment, effect: Effect) -> None:
        outer = context.manifest.outer
        self._context = context
        self._elapsed = asyncio.get_running_loop().time  # quarantines outlast a wall clock that is set right
        self._own = own
        # the last variances over replicas, as a pair showed them and as they were expected
        self._variances: deque[tuple[float, float]] = deque(maxlen=DISTANCES)
        self._model = SpreadModel()
        self._is_settled = False
        self._effect = effect
        self._defence: Defence | None = None
        if outer.clip:
            self._defence = Defence(blocks_of(own.slices, own.bounds), outer.clip, context.view.ledger)
        self.spread: float | None = None  # of the replicas of this stage, from pair distances
        self.expected_spread: float | None = None  # what the theory says it should be

    def defend(self, peer: PeerId, pull: Pull, within: slice = EVERYTHING) -> Examination | None:
        """Let the defence, if there is one, clip what the partner would pull; on the compute thread.

        `within` are the entries of the pull that are this fragment's.
        """
        if self._defence is None:
            return None
        values = pull.whole()[within]
        finding = self._defence.examine(peer, values, self._own_progress, self._elapsed())
        change = self._effect.change(values)
        if change is None:
            return finding
        kept, is_offence = self._effect.kept(peer, change)
        finding = replace(finding, loss_change=change)
        if kept < 1.0:
            values.mul_(kept)
            finding = replace(finding, clipped=1.0)
        if is_offence and finding.offence is None:
            is_over = self._defence.ledger.record_meeting(peer, True, self._elapsed())
            finding = replace(finding, offence="harmful", quarantined=is_over)
        return finding

    def _own_progress(self, bounds: slice) -> torch.Tensor:
        """z − γφ over `bounds`: β·Δ, weighted as it counts."""
        return self._own.offered_progress(bounds).mul_(self._own.settings.beta)

    def seen(
        self,
        settings: OuterSettings,
        pull: torch.Tensor,
        phi: torch.Tensor,
        progress: torch.Tensor,
        partners_phi: torch.Tensor | None,
        finding: Examination | None,
    ) -> MeetingSample | None:
        """Sample the meeting from samples of the pull, of both φ and of the own Δ, all of before the outer step.

        `settings` are those of the round. None when the partner's φ was not sent.
        """
        if partners_phi is None:
            return None
        apart = partners_phi.to(phi.device) - phi
        between = (2 * pull - settings.gamma * apart) / settings.beta  # Δ_j − Δ_i, if both have one β
        shared = cosine(progress, progress + between)
        return MeetingSample(float(apart.square().mean()), float(between.square().mean()), shared, finding)

    def round_ended(self, peer: PeerId | None, seen: MeetingSample | None, rounds: float) -> None:
        """Estimate the spread; `peer` is the partner, None in a round alone.

        `rounds` is the mean number of rounds that the fragments of this replica have had.
        """
        context = self._context
        replicas = round(context.view.replicas(context.stage, context.transport.now()))
        if not self._model.is_fed and rounds > SETTLED_ROUND:
            self._is_settled = True
        difference, before = seen.squared_difference if seen is not None else None, self._model.variance
        self.expected_spread = self._model.round_ended(
            self._own.settings, replicas, difference, self._is_settled
        )
        if seen is not None:
            measured = variance_from_distance(seen.squared_distance, max(2, replicas))
            self._variances.append((measured, before))
        self.spread = spread_from_variances(self._variances, self._model.variance)
        if seen is not None and peer is not None and seen.finding is not None:
            self._tell(peer, seen.finding)

    def refused(self, peer: PeerId) -> None:
        """Note that the partner's contribution was malformed or not finite."""
        if self._defence is not None and self._defence.ledger.record_meeting(peer, True, self._elapsed()):
            self._warn_of(peer)

    def _tell(self, peer: PeerId, finding: Examination) -> None:
        if finding.clipped:
            self._context.events.emit(
                "clipped",
                partner=peer,
                distance=finding.distance,
                radius=finding.radius,
                fraction=round(finding.clipped, 4),
                offence=finding.offence,
                loss_change=finding.loss_change,
            )
        if finding.quarantined:
            self._warn_of(peer)

    def _warn_of(self, peer: PeerId) -> None:
        self._context.events.warn(
            f"Replica {self._context.view.called(peer)} keeps sending contributions far from all others: it "
            "is left alone for a while.",
            "quarantined",
            partner=peer,
        )

    # --- what the matchmaker asks -------------------------------------------------------------

    def is_quarantined(self, peer: PeerId) -> bool:
        """Return whether not to average with the peer at present."""
        return self._defence is not None and self._defence.ledger.is_quarantined(peer, self._elapsed())


def variance_from_distance(squared_distance: float, replicas: int) -> float:
    """Mean squared deviation of `replicas` replicas from their mean, as one random pair shows it.

    From the mean square of φ_i − φ_j over parameters, or over a sample of them: for a random pair of N,
    E‖φ_i − φ_j‖²/P = 2N/(N − 1) · σ².
    """
    return squared_distance * (replicas - 1) / (2 * replicas)


def spread_from_variances(variances: Collection[tuple[float, float]], expected: float) -> float | None:
    """The spread now, from past variances as (measured, expected) and the one `expected` now; None without any.

    Where the theory expects none, as of two replicas that always meet, the mean of what was measured.
    """
    if not variances:
        return None
    measured, foreseen = (sum(values) for values in zip(*variances, strict=True))
    if not foreseen or not expected:
        return math.sqrt(measured / len(variances))
    return math.sqrt(measured / foreseen * expected)


class SpreadModel:
    """Predicts the spread of replicas from the noise of their rounds."""

    def __init__(self) -> None:
        self._noise: float | None = None
        self._sigma: Matrix = np.zeros((2, 2))

    @property
    def is_fed(self) -> bool:
        """True if the noise is known at all."""
        return self._noise is not None

    @property
    def variance(self) -> float:
        """Variance of φ over the replicas, per parameter."""
        return max(0.0, float(self._sigma[0, 0]))

    def round_ended(
        self, settings: OuterSettings, replicas: int, squared_difference: float | None, is_settled: bool
    ) -> float | None:
        """The predicted spread after one more round of a stage of `replicas`; None before anything is known.

        `squared_difference` is the mean square of Δ_i − Δ_j over parameters, None in a round without a
        partner. `is_settled` says that this replica came to a stage which had long been training: Σ is
        then taken to be stationary instead of grown from zero.
        """
        if squared_difference is not None:
            self._noise = squared_difference / 2
        noise = self._noise
        if noise is None or replicas < 2:
            return None
        if is_settled and not self._sigma.any():
            stationary = stationary_covariance(settings, replicas, noise_variance=noise)
            self._sigma = stationary if np.isfinite(stationary).all() else self._sigma
        self._sigma = covariance_recursion(self._sigma, settings, replicas, noise_variance=noise)
        return math.sqrt(self.variance)
