"""A machine whose bits flip, or whose memory holds what was there before, finds out about itself and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from bootstrap.lab.simulation.liars import replica_with
from node.model.passes import Passes
from node.model.replica import Replica
from node.model.self_check import SelfCheck
from tests.swarm.micro import FOREVER, events_of, everyone_reaches, micro_swarm, peer_of, run_swarm, until

BITS = 32
RATE = 1e-6  # of each bit of the activations, per pass


class FlippedBits(Passes):
    """Each bit of its activations is wrong with a probability of 1e-6."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, outputs = super().forward(inputs)
        wrong = outputs.detach().clone()
        numbers = wrong.view(torch.int32).view(-1)
        flips = torch.rand(numbers.numel() * BITS, generator=self._generator) < RATE
        for place in flips.nonzero().flatten().tolist():
            numbers[place // BITS] ^= 1 << (place % BITS) if place % BITS < BITS - 1 else -(2**31)
        return leaf, outputs + (wrong - outputs.detach())


class StaleMemory(Passes):
    """One pass in ten gives what the one before it gave."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generator = torch.Generator().manual_seed(1)
        self._before: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, outputs = super().forward(inputs)
        before, self._before = self._before, outputs.detach()
        is_stale = torch.rand((), generator=self._generator).item() < 0.1
        if before is None or before.shape != outputs.shape or not is_stale:
            return leaf, outputs
        return leaf, outputs + (before - outputs.detach())


@pytest.mark.parametrize("passes", [FlippedBits, StaleMemory])
def test_a_broken_machine_is_named_to_its_own_volunteer_before_others_leave_it_alone(
    passes: type[Passes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfCheck.__init__, "__defaults__", (5,))  # a hundred would be a long test

    async def main() -> None:
        swarm = micro_swarm(inner__total_steps=FOREVER, model__hidden_size=32)
        await swarm.seed_peer.start()
        for number in range(6):
            broken = number == 0
            swarm.add(number, stage=number % 2, replica=replica_with(passes) if broken else Replica)
        await everyone_reaches(swarm, 2)
        await until(lambda: bool(events_of(swarm, "damaged-machine")), 600, 1.0)
        assert {event["node"] for event in events_of(swarm, "damaged-machine")} == {0}
        assert not [
            event for event in events_of(swarm, "left-alone") if event["peer"] == peer_of(swarm.nodes[0])
        ]
        await asyncio.sleep(1)
        await swarm.leave()

    run_swarm(main())
