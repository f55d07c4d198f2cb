"""Tries a partner's pull on the sequences that this stage has trained on last, before it counts.

Averaging with an honest partner changes the loss by little, up or down; what undoes progress raises it, from
whichever direction and however near it comes. How much is little the partners themselves say: the median of what
they change. Until three are known, it is a part of what this round's own progress has done.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import torch

from node.model.replica import Replica
from node.model.resources import is_out_of_memory
from protocol.ground import PeerId
from protocol.peer_limits import PeerTable
from protocol.windows import counted, window

VOTES = 9  # last partners, one vote each
LEAST_VOTES = 3
# A pull may raise the loss by so many times what the median partner changes it by, up or down; by more, less of it
# counts: what is kept falls with the square, as of what is too far away.
USUAL = 1.5
LEAST = 0.005  # nats per token that everybody may
UNDONE = 0.25  # of what it would do to undo the round, as long as too few partners are known
OFFENCE = 4.0  # times the most that is kept whole


class Effect:
    """Knows what partners' pulls usually do to the loss. Mutable state: the last changes, by partner."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._changes = PeerTable[float](VOTES)

    @window
    def __repr__(self) -> str:
        return f"Known: {counted(len(self._changes), 'partner')}"

    @torch.no_grad()
    def change(self, pull: torch.Tensor) -> float | None:
        """What the pull [parameters] would change the loss by, in nats per token; None where that cannot be tried.

        It takes memory of the pull's size where gradients are in use.
        """
        replica, passes = self._replica, self._replica.passes
        fast = replica.named(replica.flat.values)
        before = passes.probes.loss(partial(passes.run_under, fast))
        if before is None:
            return None
        is_free = not passes.has_run and not passes.is_spoiled
        try:
            room = replica.flat.gradients if is_free else torch.empty_like(pull)
            try:
                tried = replica.named(torch.add(replica.flat.values, pull, out=room))
                after = passes.probes.loss(partial(passes.run_under, tried))
            finally:
                if is_free:
                    room.zero_()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return None if after is None else after - before

    @torch.no_grad()
    def _undone(self) -> float:
        """What it would change the loss by to undo the round, in nats per token."""
        passes = self._replica.passes
        fast, slow = (self._replica.named(w) for w in (self._replica.flat.values, self._replica.phi))
        now, before = (passes.probes.loss(partial(passes.run_under, weights)) for weights in (fast, slow))
        return before - now if before is not None and now is not None else 0.0

    def kept(self, peer: PeerId, change: float) -> tuple[float, bool]:
        """The part of a pull with this change that counts, and whether it is an offence. Remembers it."""
        known = [abs(other) for name, other in self._changes.items() if name != peer]
        usual = USUAL * median(known) if len(known) >= LEAST_VOTES else UNDONE * self._undone()
        most = max(usual, LEAST)
        self._changes[peer] = change if math.isfinite(change) else 2 * most
        if not math.isfinite(change):
            return 0.0, True
        return (most / change) ** 2 if change > most else 1.0, change > OFFENCE * most
