"""What is wrong here, told to the volunteer now and then, not with every microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from node.context import Context
from node.membership.view import Member
from node.model.replica import Replica
from protocol.errors import NonFinite

TOO_SLOW = 4.0  # times as long as the stage before takes; with less, a replica more or a move mends it


class Complaints:
    """Mutable state: what was told already."""

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._told: set[str] = set()

    def note(self, error: NonFinite) -> None:
        """A microbatch was given up for what became of it here."""
        event = "overflow" if error.overflows else "non-finite"
        if f"{event} {error.what}" in self._told:
            return
        self._told.add(f"{event} {error.what}")
        stage = self._context.stage
        if error.overflows:
            self._context.events.warn(
                f"{error.what.capitalize()} of stage {stage} are too large for {error.overflows}, in which they "
                "travel; such microbatches are dropped. If it goes on, the run's founder has to found it again with "
                f'wire.{error.what.removeprefix("the ")} = "bf16".',
                event,
                stage=stage,
                what=error.what,
                codec=error.overflows,
            )
            return
        sound = self.weights_are_finite()
        reason = (
            "the microbatch or this device may be damaged" if sound else "this replica's weights are none"
        )
        self._context.events.warn(
            f"Stage {stage} here computed NaN or infinity in {error.what}: {reason}. Such microbatches "
            "are dropped. If it goes on, stop this node, remove its checkpoint and start it again.",
            event,
            stage=stage,
            what=error.what,
            weights_are_finite=sound,
        )

    def note_step(self) -> None:
        """Whether this stage keeps up with the one before it: looked at after each inner step."""
        context, now = self._context, self._context.transport.now()
        if context.stage == 0 or "too slow" in self._told:
            return
        stage, before = (context.view.members(s, now) for s in (context.stage, context.stage - 1))
        found = lag(context.throughput.capacity(), stage, before)
        if found is None or not found.is_too_slow:
            return
        self._told.add("too slow")
        context.events.warn(
            f"Stage {context.stage} takes {found.here:.2g} s a microbatch here and {found.stage:.2g} s with all its "
            f"replicas; the stage before produces one every {found.before:.2g} s. The run goes at the pace of this "
            "stage: a faster device, more replicas of it or fewer layers in it would help.",
            "stage-too-slow",
            stage=context.stage,
            seconds_here=round(found.here, 6),
            seconds=round(found.stage, 6),
            seconds_before=round(found.before, 6),
        )

    def weights_are_finite(self) -> bool:
        return bool(torch.isfinite(self._replica.flat.values).all())


@dataclass(frozen=True)
class Lag:
    """Seconds for a microbatch, all replicas of a stage together, and of this replica alone."""

    here: float
    stage: float
    before: float

    @property
    def is_too_slow(self) -> bool:
        return self.stage > TOO_SLOW * self.before


def lag(own: float | None, stage: Iterable[Member], before: Iterable[Member]) -> Lag | None:
    """`own` is this replica's capacity in microbatches per second; None while too little is known."""
    ours, theirs = (
        [member.announcement.capacity for member in members if member.announcement.state == "serving"]
        for members in (stage, before)
    )
    if not own or not ours or not theirs or not all([*ours, *theirs]):
        return None
    return Lag(
        here=1 / own,
        stage=1 / sum(capacity for capacity in ours if capacity),
        before=1 / sum(capacity for capacity in theirs if capacity),
    )
