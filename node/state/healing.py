"""A replica that notices its own trouble: batches it could not learn from, weights that are NaN or infinity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from node.context import Context
from node.model.compute import Priority
from node.model.inner import LeftOut, StepReport
from node.model.replica import Replica
from node.state.checkpoints import Checkpoints
from protocol.errors import NodeFailed
from protocol.windows import window

TELL_SECONDS = 60.0  # between two sentences about batches that were left out

REASONS: dict[LeftOut, str] = {
    "non-finite": "A gradient was not finite (NaN or infinity)",
    "absurd": "A gradient was out of all proportion",
    "memory": "Memory ran out in a backward pass or in the optimizer",
    "replaced": "The weights were replaced in the middle of a batch",
}


class Healing:
    """Reloads or downloads weights when this replica finds that it has lost its own.

    Mutable state: batches left out since that was last told, and when it was; when weights were last lost.
    """

    def __init__(
        self,
        context: Context,
        replica: Replica,
        checkpoints: Checkpoints,
        abandon: Callable[[], Awaitable[None]],
        download: Callable[[], Awaitable[bool]],
    ) -> None:
        """`abandon` drops exchanges of the old weights; `download` takes those of other replicas, if it can."""
        self._context = context
        self._replica = replica
        self._checkpoints = checkpoints
        self._abandon = abandon
        self._download = download
        self.looked_at = -math.inf  # loop time at which the weights were last looked at
        self._left_out = 0
        self._told_at: float | None = None
        self._lost_at: int | None = None  # step
        self._in_a_row = 0  # steps left out for their gradients

    @window
    def __repr__(self) -> str:
        lost = "never" if self._lost_at is None else f"at step {self._lost_at}"
        return f"Left out: {self._left_out} untold, {self._in_a_row} in a row | Weights lost: {lost}"

    async def step_done(self, report: StepReport) -> None:
        """Tell of a batch that was left out, and see to the weights, which may be the reason."""
        self._in_a_row = self._in_a_row + 1 if report.left_out in ("non-finite", "absurd") else 0
        if not report.left_out:
            return
        self._left_out += 1
        now = asyncio.get_running_loop().time()
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            count, self._left_out, self._told_at = self._left_out, 0, now
            since = f" {count} steps were left out since this was last said." if count > 1 else ""
            self._context.events.warn(
                f"{REASONS[report.left_out]}; this step was left out, training goes on.{since}",
                "step-left-out",
                reason=report.left_out,
                steps=count,
            )
        if report.left_out == "non-finite":
            await self.is_well()
        self._require_progress()

    def _require_progress(self) -> None:
        """Raise `NodeFailed` after two rounds of nothing but worthless gradients, where others go on without."""
        context = self._context
        others = {*context.view.serving(context.stage, context.transport.now())} - {context.me}
        if others and self._in_a_row >= 2 * context.manifest.outer.cycle_steps:
            raise NodeFailed(
                f"{self._in_a_row} inner steps in a row were left out since their gradients were worthless, while "
                "others train this stage. Check the device (memory errors, heat, overclocking) and start again."
            )

    async def is_well(self) -> bool:
        """Return whether all weights are finite. If not, they are taken from other replicas or the last checkpoint.

        Raises `NodeFailed` when there are none, or they are lost a second time within a round: no copy mends that.
        """
        context, replica = self._context, self._replica
        self.looked_at = asyncio.get_running_loop().time()
        if await context.compute.run(Priority.OPTIMIZER, replica.is_finite):
            return True
        context.events.warn(
            "The weights of this node became NaN or infinity; it takes a good copy.",
            "weights-lost",
            step=replica.step,
        )
        if self._lost_at is not None and replica.step - self._lost_at < context.manifest.outer.cycle_steps:
            raise NodeFailed(
                "The weights of this node became NaN or infinity again right after they were replaced. Check the "
                "device (memory errors, heat, overclocking) and start the node again; the others train on."
            )
        await self._replace()
        self._lost_at = replica.step
        return False

    async def _replace(self) -> None:
        if await self._download():
            return
        await self._abandon()
        if not await self._checkpoints.take_up_last():
            raise NodeFailed(
                "The weights of this node are NaN or infinity, and there is neither another replica nor a checkpoint "
                "to take good ones from. Found the run again with a lower learning rate, or a longer warm-up."
            )
        replica = self._replica
        self._context.events.say(
            f"The weights of the last checkpoint took their place, of round {replica.round}.",
            "weights-replaced",
            round=replica.round,
        )
