"""Validation for whoever asks: forward passes with the slow weights along a route that the asker chose."""

from __future__ import annotations

from node.context import Context
from node.model.compute import Priority
from node.model.stage_work import StageWork
from protocol.errors import Refused, WireError
from protocol.messages.training import Evaluate, Evaluated
from protocol.patience import Patience
from protocol.rpc import Answer, Request, Rpc
from protocol.transport.base import PeerId

EVALUATION_DEADLINE = 60.0  # of silence: it may wait long behind the training of a slow stage
EVALUATION_STANDSTILL = 600.0  # and not for ever


class EvaluationService:
    """Stands behind training: it computes only when no microbatch waits."""

    def __init__(self, context: Context, work: StageWork) -> None:
        self._context = context
        self._work = work

    def serve(self, rpc: Rpc) -> None:
        """Answer others from now on."""
        rpc.handle(Evaluate.answered_by(self.on_evaluate))

    async def on_evaluate(self, request: Request[Evaluate]) -> Answer[Evaluated]:
        """Loss of the slow weights on a microbatch, along the route that the caller chose."""
        context, message = self._context, request.message
        manifest = context.manifest
        is_back = manifest.is_ring and context.stage == 0 and message.stage == manifest.stages
        is_ours = is_back or message.stage == context.stage
        if not is_ours or len(message.route) != manifest.hops - 1 - message.stage:
            raise Refused("not-serving", "the route does not fit this stage")
        if context.is_last or is_back:
            loss_sum, tokens = await context.compute.run(
                Priority.SERVE,
                self._work.evaluate_last,
                lambda: self._work.decoded(request, is_back, may_be_short=True),
                is_back,
            )
            return Answer(Evaluated(loss_sum=loss_sum, tokens=tokens))
        parcel = await context.compute.run(
            Priority.SERVE, self._work.evaluate, lambda: self._work.decoded(request, may_be_short=True)
        )
        onward = Evaluate(stage=message.stage + 1, route=message.route[1:])
        try:
            evaluated, _ = await context.rpc.call(
                PeerId(message.route[0]),
                onward,
                parcel,
                deadline=Patience(EVALUATION_DEADLINE, EVALUATION_STANDSTILL),
            )
        except WireError as failure:  # of the next stage, not of the one who asks
            raise Refused("failed", f"stage {onward.stage} answered nonsense") from failure
        return Answer(evaluated)
