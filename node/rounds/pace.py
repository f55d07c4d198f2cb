"""Judges how quick this replica is beside the others, and whether it missed what they did meanwhile. Pure.

`Tempo` times inner steps, and `steps_of_round` says how many of them make a round: k, or what fits into the others'
time for k. `Standing` says whether this replica belongs to its stage. Being slow is not being stale: a machine ten
times slower than the others ends a tenth of their rounds, and its work counts. A replica is behind in two cases
only. It began alone, from the seed or from what it had saved, because it saw nobody, and finds that the others have
been at it for long. Or it stood still, frozen or cut off, for rounds on end while the others went on. It then
downloads the stage's state, once, and belongs from there on.

Nobody's word alone makes a replica download: most of the others must say so, each in its own signed record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from node.membership.view import Member
from node.rounds.meeting import Bounds, RoundProgress
from node.watch.loss_history import centre_and_deviation
from protocol.ground import PeerId

TIMED_STEPS = 16
# Times the median: longer steps count as this long. The first step waits for others to start, and one that meets a
# dead peer for its deadline; but where microbatches come at random, long steps belong to the mean.
LONGEST_STEP = 4.0
TIMED_PAUSES = 5
STALLED_STEPS = 3  # a step that takes this many times its time, and more than the window, says nothing
FURTHEST = 4  # times k, or a part of it: beyond that a replica's progress would no longer be comparable
FAR_AHEAD = 5  # rounds; two replicas that are nearer to each other than that may as well average
RATE_ERROR = 2.0  # announced speeds are those of a few inner steps, some of them long ago
RETRY_SECONDS = 30.0  # after a download that failed
SHORTEST_ROUND = 1e-3  # seconds
LEAST_AWAY = 60.0  # seconds; a shorter stop is an exchange or a resend that took its deadline
# A loss so many deviations above the others' for so long is that of weights which are not theirs: a state that a liar
# gave, or that a machine spoilt. The deviation comes from the others that are below their median; 3 % at least.
FAR_LOSS = 8.0
LEAST_LOSS_DEVIATION = 0.03
TELLING = 3  # replicas that must tell theirs
ODD_SECONDS = 60.0
LOSS_AGAIN_SECONDS = 600.0  # after a download


class Tempo:
    """Times this replica's inner steps and rounds."""

    def __init__(self, now: float) -> None:
        self._steps: deque[float] = deque(maxlen=TIMED_STEPS)
        self._pauses: deque[float] = deque(maxlen=TIMED_PAUSES)
        self._step_began = self._round_ended = now
        self._usual = 0.0  # seconds of a step

    def step_done(self, seconds: float, now: float) -> None:
        self._steps.append(seconds)
        longest = LONGEST_STEP * median(self._steps)
        self._usual = fmean(min(seconds, longest) for seconds in self._steps)
        self._step_began = now

    def round_ended(self, now: float) -> None:
        self._round_ended = now

    def round_began(self, now: float) -> None:
        self._pauses.append(now - self._round_ended)
        self._step_began = now

    @property
    def is_known(self) -> bool:
        """True if there was a step to time."""
        return bool(self._steps)

    @property
    def pause(self) -> float:
        """Seconds between the last inner step of a round and the beginning of the next round."""
        return median(self._pauses) if self._pauses else 0.0

    def progress(self, now: float, steps: int) -> RoundProgress:
        """The progress of the round after so many inner steps."""
        return RoundProgress(now, steps, self._usual, now - self._step_began)

    def is_stalled(self, now: float, bounds: Bounds) -> bool:
        """Return whether nobody can say when this round will end."""
        here = self.progress(now, 0)
        slack = max(STALLED_STEPS, bounds.ends_at - bounds.nominal)
        return not self.is_known or here.into_step > slack * here.step_seconds


def steps_of_round(
    pace: Literal["steps", "time"], inner_steps: int, own_rate: float, rates: Sequence[float]
) -> int:
    """The nominal number of inner steps of a replica's next round, from k/4 to 4k; k with the pace "steps".

    `rates` are the speeds of the stage's other replicas as they announce them, in any one unit per second;
    not positive means not known yet. The median step time decides, so that a few replicas which announce
    nonsense change little.
    """
    known = [rate for rate in rates if rate > 0]
    if pace == "steps" or own_rate <= 0 or not known:
        return inner_steps
    step_seconds = median(1 / rate for rate in [own_rate, *known])
    fitting = inner_steps * step_seconds * own_rate
    return max(1, round(min(max(fitting, inner_steps / FURTHEST), inner_steps * FURTHEST)))


@dataclass(frozen=True)
class Other:
    """Another replica of the stage as its record shows it. Not positive: its speed is not known yet."""

    peer: PeerId
    round: int
    tokens_per_second: float
    loss: float | None = None  # of its last steps, in nats per token


def others_among(members: Sequence[Member], me: PeerId) -> list[Other]:
    """Pick the other members that train."""
    return [
        Other(told.peer, told.announcement.round, told.announcement.tokens_per_second, told.announcement.loss)
        for told in members
        if told.peer != me and told.announcement.state == "serving"
    ]


@dataclass(frozen=True)
class _Absence:
    seconds: float
    rounds: float  # of this replica's, that it had time for
    tokens_per_second: float  # of this replica, before
    rounds_before: Mapping[PeerId, int]  # the others'
    back_at: int  # this replica's round
    told_until: float  # by then the others' new records have been read


class Standing:
    """Notices that this replica missed what others did while it was away or too slow.

    Times are the loop's, in seconds. `lifetime` is that of records: after it a view is fresh. Where each round is of
    one of so many `fragments`, as much of the whole goes by in so many times the rounds.
    """

    def __init__(self, lifetime: float, fragments: int = 1) -> None:
        self._lifetime = lifetime
        self._far_ahead = FAR_AHEAD * fragments
        self.is_alone = False  # it began alone and has met nobody since
        self._last_step: float | None = None
        self._rate_then = 0.0
        self._rounds_then: Mapping[PeerId, int] = {}
        self._absence: _Absence | None = None
        self._asks_again_at = 0.0
        self._odd: tuple[float, float, float] | None = (
            None  # since when its loss is; that loss, and the others'
        )
        self._loss_counts_at = 0.0

    def began_alone(self) -> None:
        """Note that the first state is the seed's or a saved one, and nobody seen could have given another."""
        self.is_alone = True

    def met(self) -> None:
        """Note that it has averaged with a partner, and so takes part in what the stage knows."""
        self.is_alone = False

    def downloaded(self) -> None:
        """Note that its state is the others': what it missed before is made up for."""
        self.is_alone = False
        self._absence = self._odd = None
        self._loss_counts_at = (self._last_step or 0.0) + LOSS_AGAIN_SECONDS

    def download_failed(self, now: float) -> None:
        """Note that a download failed: training goes on with what there is, for a while."""
        self._asks_again_at = now + RETRY_SECONDS

    def step_done(
        self, now: float, round_: int, tokens_per_second: float, round_seconds: float, others: Sequence[Other]
    ) -> None:
        """Note an inner step's end; its rounds usually take `round_seconds`. A long stop before it is an absence.

        A stop no longer than the records live says nothing: the others' rounds before it are not known so well.
        """
        away = now - self._last_step if self._last_step is not None else 0.0
        if away >= max(LEAST_AWAY, self._lifetime, self._far_ahead * round_seconds):
            had_time_for, until = away / max(round_seconds, SHORTEST_ROUND), now + self._lifetime
            self._absence = _Absence(away, had_time_for, self._rate_then, self._rounds_then, round_, until)
        elif self._absence is not None and now > self._absence.told_until:
            self._absence = None
        self._last_step, self._rate_then = now, tokens_per_second
        self._rounds_then = {other.peer: other.round for other in others}

    def note_loss(self, now: float, loss: float | None, others: Sequence[Other]) -> None:
        """Note the loss of the last steps: with one far above the others' for long, its weights are to blame."""
        known = [other.loss for other in others if other.loss is not None]
        if loss is None or len(known) < TELLING or now < self._loss_counts_at:
            self._odd = None
            return
        centre, deviation = centre_and_deviation(known)
        if loss > centre + FAR_LOSS * max(deviation, LEAST_LOSS_DEVIATION * abs(centre)):
            self._odd = self._odd[0] if self._odd is not None else now, loss, centre
        else:
            self._odd = None

    def why_behind(self, now: float, round_: int, tokens_per_second: float, others: Sequence[Other]) -> str:
        """A clause for the volunteer, empty when the replica is not behind. The numbers are its own."""
        if now < self._asks_again_at:
            return ""
        if self.is_alone and tokens_per_second > 0:
            ahead = [_missed(other, round_, tokens_per_second) >= self._far_ahead for other in others]
            if _most(ahead):
                return "it began alone, and the others have been training for long"
        if self._absence is not None:
            known = [other for other in others if other.peer in self._absence.rounds_before]
            if _most([self._went_on(other, round_, self._absence) for other in known]):
                return f"it stood still for {self._absence.seconds:.0f} s while the others went on"
        if self._odd is not None and now - self._odd[0] >= ODD_SECONDS:
            _, loss, centre = self._odd
            return f"its loss of {loss:.2f} is far above {centre:.2f}, the others'"
        return ""

    def is_far_ahead(self, others_round: int, round_: int) -> bool:
        """Return whether a replica that is at `others_round` has done far more than one at `round_`."""
        return others_round - round_ >= self._far_ahead

    def _went_on(self, other: Other, round_: int, absence: _Absence) -> bool:
        """Return whether the other ended most rounds that it had time for in the absence, beside those since then.

        In a stop of the whole stage it ended none; what its last record did not show yet is at most half of that.
        """
        faster = _faster(other, absence.tokens_per_second)
        since = RATE_ERROR * faster * (round_ - absence.back_at + 1)
        gained = other.round - absence.rounds_before[other.peer] - since
        return gained > max(self._far_ahead, faster * absence.rounds / 2)


def _missed(other: Other, round_: int, tokens_per_second: float) -> float:
    """Rounds that the other has ended beyond those that its speed gave it while this replica ended its own."""
    if other.tokens_per_second <= 0:
        return 0.0
    return other.round - RATE_ERROR * _faster(other, tokens_per_second) * (round_ + 1)


def _faster(other: Other, tokens_per_second: float) -> float:
    return max(1.0, other.tokens_per_second / tokens_per_second) if tokens_per_second > 0 else 1.0


def _most(votes: Sequence[bool]) -> bool:
    return 2 * sum(votes) > len(votes)
