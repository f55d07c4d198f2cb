"""Tries a partner's pull on the sequences that this stage has trained on last, before it counts.

Averaging with an honest partner changes the loss by little, up or down; what undoes progress raises it, from
whichever direction and however near it comes. How much is little the partners themselves say: the median of what
they change, which is above 0 where a stage knows its own last sequences by heart, and how far below it they usually
are, since who does wrong is above. Until six are known, it is no more than a part of what this round's own progress
has done. One meeting says little, so the last ones with the same partner count together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from node.model.fragment import Fragment
from node.model.replica import Replica
from node.model.resources import is_out_of_memory
from protocol.access.peer_limits import PeerTable
from protocol.ground import PeerId
from protocol.windows import counted, window

VOTES = 9  # last partners, one vote each
LEAST_VOTES = 3
SURE_VOTES = 6  # with fewer, two that do wrong make the others' deviation
MEETINGS = 5  # last ones with one partner that count together
PARTNERS = 256  # whose meetings are remembered
LEAST = 0.005  # nats per token that everybody may
UNDONE = 1 / 6  # of what it would do to undo the round: the largest unit as long as few partners are known
WHOLE = 1.5  # units above what is usual, by the last meetings together, up to which all of a pull counts
OFFENCE = 4.0  # of these units; and more than all of this round undone
CREDIT = 2.0  # of a meeting that lowered the loss, at most


def bounded_mean(changes: torch.Tensor) -> float:
    """The mean of the tokens' changes, each bounded softly by the usual size of one: a few wild ones do not decide.

    What first order says of a token is far off where the change is large.
    """
    usual = changes.abs().median().clamp_min(1e-9)
    return (torch.tanh(changes / usual) * usual).mean().item()


class Effect:
    """Knows what partners' pulls usually do to the loss.

    Mutable state: the last changes by partner, those of its last meetings in units of what was usual then, and what
    the own round that was last looked at had done.
    """

    def __init__(self, replica: Replica, own: Fragment) -> None:
        """`own` is what of the replica is averaged."""
        self._replica = replica
        self._own = own
        self._changes = PeerTable[float](VOTES)
        self._excesses = PeerTable[deque[float]](PARTNERS)
        self._progress = 0.0  # nats per token

    @window
    def __repr__(self) -> str:
        return f"Known: {counted(len(self._changes), 'partner')}"

    @torch.no_grad()
    def change(self, pull: torch.Tensor) -> float | None:
        """What the pull [parameters] would change the loss by, in nats per token; None where that cannot be tried.

        It takes memory of the replica's size where gradients are in use.
        """
        before = self._losses(self._replica.flat.values)
        after = None if before is None else self._losses_with(partial(torch.add, self._own.theta, pull))
        return None if before is None or after is None else bounded_mean(after - before)

    @torch.no_grad()
    def _undone(self) -> float:
        """What it would change the loss by to undo the round, in nats per token; without progress, an earlier one."""
        now = self._losses(self._replica.flat.values)
        before = None if now is None else self._losses_with(lambda out: out.copy_(self._own.phi))
        if before is not None and now is not None:
            self._progress = max(0.0, bounded_mean(before - now)) or self._progress
        return self._progress

    def _losses(self, weights: torch.Tensor) -> torch.Tensor | None:
        """The losses of the last sequences' tokens under these weights, [parameters] of the replica."""
        passes = self._replica.passes
        return passes.probes.losses(partial(passes.run_under, self._replica.named(weights)))

    def _losses_with(self, write: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """Those under the fast weights and, for what is averaged, what `write` puts in `out`; None without memory."""
        replica, passes = self._replica, self._replica.passes
        is_free = not passes.has_run and not passes.is_spoiled
        try:
            room = replica.flat.gradients if is_free else torch.empty_like(replica.phi)
            try:
                write(out=room.copy_(replica.flat.values)[self._own.bounds])
                return self._losses(room)
            finally:
                if is_free:
                    room.zero_()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def kept(self, peer: PeerId, change: float) -> tuple[float, bool]:
        """The part of a pull with this change that counts, and whether it is an offence. Remembers it.

        With e how far the last n meetings were above what is usual, in units of how far others were from it then,
        (WHOLE √n / Σe)² counts where Σe / √n is above WHOLE: by chance e is as often below 0. Earlier meetings are
        bounded. Who is merely slow has gone a part of the way and no further back than this replica began: that is
        no offence, and of too few others nothing is one.
        """
        known = [other for name, other in self._changes.items() if name != peer]
        are_enough = len(known) >= LEAST_VOTES
        if are_enough:
            usual = max(0.0, median(known))
            unit = median(usual - other for other in known if other <= usual)
        else:
            usual, unit = 0.0, math.inf
        unit = max(LEAST, min(unit, UNDONE * self._undone()) if len(known) < SURE_VOTES else unit)
        if not math.isfinite(change):
            self._changes[peer] = usual + 2 * unit
            return 0.0, True
        self._changes[peer] = change
        now, earlier = (change - usual) / unit, self._excesses.get(peer) or deque(maxlen=MEETINGS - 1)
        together = (now + sum(earlier)) / math.sqrt(1 + len(earlier))
        earlier.append(min(max(now, -CREDIT), OFFENCE))  # one meeting alone decides no later one
        self._excesses[peer] = earlier
        kept = (WHOLE / together) ** 2 if together > WHOLE else 1.0
        return kept, are_enough and together > OFFENCE and change > self._undone()
