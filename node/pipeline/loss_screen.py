"""Screens what the stage before sends by the losses that come of it: wrong labels and activations show there.

A stage's own losses say how far apart honest ones are. Their level is the median of the last ones of the senders, and
their deviation comes from what is below it, since who does wrong is above. Fewer than half of the senders may,
however much each sends: those of whom nothing counts go on when all others are at the end of the run.

A text that is hard to learn is no lie, and a sender is judged by many texts: a known one may have any loss that text
has, and its mean leaves out its largest loss. A microbatch of an unknown sender does not count far above the level.

One sender's mean is compared with the other senders': of whoever stands out only that counts which looks like the
others', until its mean does again, and whoever is odd beyond chance is doubted and told of. So who was merely behind
is believed as soon as it has caught up, and no time is served.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

from node.watch.loss_history import centre_and_deviation
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId
from protocol.windows import counted, window

# The level is the median of the last losses of so many latest senders: one vote each, however much one sends. Where
# there are enough such, only of senders whose last one is among so many recent ones: where these are not most of the
# senders, if that is lower, since losses fall as a run goes on.
LEVEL = 16
RECENT = 128
EACH = 16  # last excesses of a sender over the level, of which its mean comes
HISTORY = 128  # of which the deviation comes, as many of each sender
ENOUGH = 24  # excesses before anything is judged, and of one sender:
ENOUGH_OF_ONE = 5
ENOUGH_TO_WONDER = 3
SENDERS = 64  # that are compared, the latest
FEWEST_SENDERS = 3
FAR = 8.0  # deviations of one microbatch that does not count, of a sender that is not known
# Times the loss of guessing, ln of the vocabulary, that one text of a known sender may have. Measured with the preset
# tiny up to step 400: base64, hexadecimal, random letters up to 1.1; flipped labels 1.6 from step 60 on, 2.1 at last.
OF_GUESSING = 1.25
STANDS_OUT = 2.5  # deviations of a sender's mean: of the honest one in a hundred, at times
ODD = 5.0  # deviations of a sender's mean that is not like others'
AGAIN = 2.0  # deviations within which the mean of a doubted sender is like others' again
ALIKE = 1.0  # deviations within which a microbatch of such a sender counts
NOTHING = 1e-9  # nats
# Shares of the device's time for microbatches that do not count for their loss, for one sender and for all such
# senders. The first microbatches, below, are free: a sender that was behind is judged by that many once it caught up.
ODD_SHARE, ALL_ODD_SHARE = 0.05, 0.1
ODD_AT_ONCE, ALL_ODD_AT_ONCE = 16, 64
ODD_PAUSE = 1.0  # seconds until a sender that has used up its share is refused
ODD_LATELY = (
    30.0  # seconds for which a sender shares in what all such senders may take, once it has paid its own
)
OWING = 1_024  # senders of which is remembered what they owe
LEAST_DEVIATION = 0.02  # of the level: below that nobody is told apart


class LossScreen:
    """Knows the usual losses of what peers send, and who is odd. Mutable state: last losses, of all and of each."""

    def __init__(self, vocabulary: int = 1) -> None:
        """`vocabulary` is the model's number of tokens; with 1 no text is taken for hard."""
        self._hard_text = OF_GUESSING * math.log(vocabulary)
        self._latest = PeerTable[tuple[int, float]](LEVEL)  # loss by sender, and its number
        self._noted = 0
        self._each = PeerTable[deque[float]](SENDERS)
        self._doubted = PeerTable[float](SENDERS)  # their mean excess

    @window
    def __repr__(self) -> str:
        senders, doubted = counted(len(self._each), "sender"), len(self._doubted)
        return f"Losses: {self._noted} of {senders} | Doubted: {doubted}"

    def is_doubted(self, sender: PeerId) -> bool:
        return sender in self._doubted

    def most(self, sender: PeerId | None, is_ending: bool = False) -> float:
        """The largest loss with which a microbatch of the sender counts, in nats per token; infinite at first.

        Infinite also for what this node has drawn itself, with None. When the run `is_ending`, that is, most senders
        have finished, nobody is trusted: whoever does wrong may be most of those that are left, and what the stage
        learns of them nobody else makes good.
        """
        if sender is None or self._noted <= ENOUGH:
            return math.inf
        level, deviation = self._level(), self._deviation()
        stands_out = self._distance(sender, ENOUGH_TO_WONDER) >= STANDS_OUT
        if is_ending or stands_out or self.is_doubted(sender):
            return level + ALIKE * deviation
        is_known = len(self._each.get(sender) or ()) >= ENOUGH_OF_ONE
        return max(level + FAR * deviation, self._hard_text if is_known else 0.0)

    def note(self, sender: PeerId, loss: float) -> bool:
        """Note a loss, also of what did not count; return whether the sender is doubted from now on."""
        if self._latest:
            excess = loss - self._level()
            own = self._each.get(sender) or deque(maxlen=HISTORY)
            self._each[sender] = own
            own.append(excess)
        self._noted += 1
        self._latest[sender] = self._noted, loss
        was_doubted, is_odd = self.is_doubted(sender), self._is_odd(sender)
        if is_odd:
            self._doubted[sender] = _mean(self._each[sender])
        else:
            self._doubted.pop(sender, None)
        return is_odd and not was_doubted

    def _is_odd(self, sender: PeerId) -> bool:
        bound = AGAIN if self.is_doubted(sender) else ODD
        return self._noted > ENOUGH and self._distance(sender, ENOUGH_OF_ONE) > bound

    def _distance(self, sender: PeerId, enough: int) -> float:
        """How far the sender's mean is above the others', in deviations; 0 where one has not sent `enough`."""
        means = {peer: _mean(own) for peer, own in self._each.items() if len(own) >= enough}
        if len(means) < FEWEST_SENDERS or sender not in means:
            return 0.0
        within = self._deviation() / math.sqrt(min(len(self._each[sender]), EACH))
        centre, between = centre_and_deviation(list(means.values()))
        return (means[sender] - centre) / max(math.hypot(within, between), NOTHING)

    def _level(self) -> float:
        latest = [loss for _, loss in self._latest.values()]
        recent = [loss for number, loss in self._latest.values() if number > self._noted - RECENT]
        if len(recent) < FEWEST_SENDERS:
            return median(latest)
        are_most = 2 * len(recent) > len(latest)
        return median(recent) if are_most else min(median(recent), median(latest))

    def _deviation(self) -> float:
        of_each = max(1, HISTORY // len(self._each))
        excesses = [excess for own in self._each.values() for excess in _last(own, of_each)]
        return max(centre_and_deviation(excesses)[1], LEAST_DEVIATION * abs(self._level()))


class OddWork:
    """Bounds the time in which microbatches are computed whose losses then do not count.

    Each takes a forward pass, and leaves its place in the step to the next one: a sender that floods such would have
    all the time that others leave for a moment. Mutable state: when the time is made up for that was spent on each
    sender, and on all of them, by the loop's clock.
    """

    def __init__(self) -> None:
        self._due = PeerTable[float](OWING)
        self._all_due = -math.inf

    @window
    def __repr__(self) -> str:
        return f"Senders: {len(self._due)} remembered"

    def affords(self, sender: PeerId, seconds: float, now: float) -> bool:
        """Return whether another microbatch of the sender, of these seconds of work, may be computed.

        A sender of whom all counted lately may always send.
        """
        owed = self._due.get(sender, -math.inf) - now
        if owed <= -ODD_LATELY:
            return True
        others_owe = self._all_due - now
        return (
            owed <= ODD_AT_ONCE * seconds / ODD_SHARE
            and others_owe <= ALL_ODD_AT_ONCE * seconds / ALL_ODD_SHARE
        )

    def charge(self, sender: PeerId, seconds: float, now: float) -> None:
        """Note the seconds of work for a microbatch of the sender that did not count."""
        self._due[sender] = max(self._due.get(sender, now), now) + seconds / ODD_SHARE
        self._all_due = max(self._all_due, now) + seconds / ALL_ODD_SHARE


def _mean(excesses: deque[float]) -> float:
    """The mean of a sender's last excesses but the largest: one text does not make it odd."""
    last = sorted(_last(excesses, EACH))
    return fmean(last[:-1] or last)


def _last(excesses: deque[float], count: int) -> list[float]:
    return list(excesses)[-count:]
