"""Rounds: exchange z with the partner that the matchmaker found, take the outer step."""

from __future__ import annotations

import asyncio
import random

import torch

from node.compute import Priority
from node.context import Context
from node.exchange import Exchange, Received
from node.matchmaker import Matchmaker
from node.pairing import Pair
from node.replica import Replica
from node.spread import SpreadEstimate
from protocol.errors import Refused
from protocol.messages import Contribute, Done
from protocol.rpc import Answer, Request


class Rounds:
    """Mutable state: the search for a partner, the exchange, the spread as it is known."""

    def __init__(self, context: Context, replica: Replica, rng: random.Random) -> None:
        self._context = context
        self._replica = replica
        self._exchange = Exchange(context, replica)
        self._spread = SpreadEstimate()
        self.matchmaker = Matchmaker(context, replica, rng, agreed=self._exchange.expect)

    @property
    def must_end(self) -> bool:
        """Whether this end of an inner step is also the end of the round."""
        return self.matchmaker.must_end

    @property
    def has_partner(self) -> bool:
        return self.matchmaker.pair is not None

    async def finish(self) -> None:
        """Exchange with the agreed partner, if any, and take the outer step with what is there.

        Always leaves a valid update behind: without a whole contribution from the partner before the
        deadline, the group is this replica alone.
        """
        context, replica = self._context, self._replica
        began = asyncio.get_running_loop().time()
        pair = await self.matchmaker.conclude()
        z = await context.compute.run(Priority.OPTIMIZER, replica.contribution)
        received = await self._exchange.swap(pair, z) if pair is not None else None
        if received is not None and received.phi_sample is not None:
            self._note_distance(received.phi_sample)
        await context.compute.run(Priority.OPTIMIZER, self._work_finish, z, received)
        self._record(pair if received is not None else None, asyncio.get_running_loop().time() - began)
        self._exchange.forget_all()
        self.matchmaker.begin_round()

    def _work_finish(self, z: torch.Tensor, received: Received | None) -> None:
        mean = z if received is None else (self._exchange.as_sent(z) + received.z).div_(2)
        self._replica.finish_round(mean)

    async def on_contribute(self, request: Request) -> Answer:
        message: Contribute = request.message
        if not self.matchmaker.is_expected(message.pair, request.peer):
            raise Refused("unknown-pair")
        self._exchange.receive(message, request.tensors())
        return Answer(Done())

    def _note_distance(self, phi_sample: torch.Tensor) -> None:
        """The mean squared difference of two random replicas estimates their spread."""
        context = self._context
        self._spread.note(self._exchange.phi_sample(), phi_sample)
        replicas = len(context.view.members(context.stage, context.transport.now()))
        context.counters.spread = self._spread.value(replicas)

    def _record(self, pair: Pair | None, seconds: float) -> None:
        context = self._context
        context.counters.blocked_seconds += seconds
        context.counters.partner = pair.partner if pair else ""
        if pair is not None:
            context.view.trust(pair.partner)
            context.counters.partners[pair.partner] = context.counters.partners.get(pair.partner, 0) + 1
        context.events.emit(
            "round",
            round=self._replica.round,
            step=self._replica.step,
            partner=pair.partner if pair else None,
            seconds=round(seconds, 6),
            spread=context.counters.spread,
        )

    async def close(self) -> None:
        await self.matchmaker.close()
