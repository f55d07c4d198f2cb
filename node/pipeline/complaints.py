"""What is wrong with this replica's own work: told to its volunteer once, not with every microbatch."""

from __future__ import annotations

import torch

from node.context import Context
from node.model.replica import Replica
from node.pipeline.too_slow import lag
from protocol.errors import NonFinite


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
        found = lag(context.counters.capacity(), stage, before)
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
