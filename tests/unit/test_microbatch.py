"""One microbatch at a stage: what is told of it, and that it either counts or is cancelled, never both."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.model.transfer import Here
from node.pipeline.gate import Gate
from node.pipeline.microbatch import DrawnMicrobatch, StageParts
from protocol.errors import Refused
from protocol.messages import Progress

BATCH = torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)


class Stage:
    """What a microbatch needs of one: a device that has finished so many pieces of work, a gate, and its passes."""

    def __init__(self, batch: int = 2) -> None:
        self.now = 0.0
        self.compute = SimpleNamespace(finished=0, clock=lambda: self.now)
        self.gate = Gate(batch, 0, batch)
        self.learned: list[torch.Tensor] = []
        context = SimpleNamespace(stage=0, manifest=SimpleNamespace(is_ring=False), compute=self.compute)
        self.parts = StageParts(
            cast(Any, context), cast(Any, self), cast(Any, None), self.gate, itertools.count()
        )

    def last_stage(
        self, inputs: torch.Tensor, labels: torch.Tensor, most: float
    ) -> Here[tuple[float, list[Any]]]:
        self.learned.append(labels)
        return Here((2.0, []))

    def microbatch(self, name: str = "12-0") -> DrawnMicrobatch:
        return DrawnMicrobatch(self.parts, name, BATCH, 12)


def test_it_gets_on_with_each_state_and_with_what_the_device_finishes_meanwhile() -> None:
    async def main() -> None:
        stage = Stage(batch=1)
        await stage.gate.enter("one at work")
        microbatch = stage.microbatch()
        microbatch.mark_queued()
        turn = asyncio.create_task(stage.gate.enter(microbatch.place))
        await asyncio.sleep(0)
        first = microbatch.progress()
        assert (first.state, first.ahead) == ("queued", 1)
        stage.compute.finished = 2
        assert microbatch.progress().done == first.done + 2
        microbatch.mark_computing()
        assert (microbatch.progress().state, microbatch.progress().done) == ("computing", first.done + 3)
        assert microbatch.progress().ahead == 0
        turn.cancel()

    run_virtual(main())


def test_at_a_later_stage_only_what_that_one_says_counts() -> None:
    async def main() -> None:
        stage = Stage()
        microbatch = stage.microbatch()
        microbatch.mark_onward()
        before = microbatch.progress().done
        stage.compute.finished = 9
        assert microbatch.progress().done == before
        for done in (4, 4, 6):
            microbatch.note_onward(Progress(state="queued", ahead=2, done=done))
        told = microbatch.progress()
        assert (told.state, told.ahead, told.done) == ("onward", 2, before + 2)

    run_virtual(main())


def test_once_it_counts_it_cannot_be_cancelled() -> None:
    async def main() -> None:
        stage = Stage()
        microbatch = stage.microbatch()
        assert microbatch.last_stage().wait() == (2.0, [])
        assert not microbatch.cancel()
        assert torch.equal(stage.learned[0], BATCH[1])

    run_virtual(main())


def test_what_was_cancelled_is_not_computed() -> None:
    async def main() -> None:
        stage = Stage()
        microbatch = stage.microbatch()
        assert microbatch.cancel()
        with pytest.raises(Refused, match="given-up"):
            microbatch.last_stage()
        assert not stage.learned

    run_virtual(main())


def test_one_that_is_tried_again_has_another_place_and_another_name_onward() -> None:
    async def main() -> None:
        stage = Stage()
        one, again = stage.microbatch(), stage.microbatch()
        assert one.name == again.name
        assert one.place != again.place
        assert one.onward_name != again.onward_name

    run_virtual(main())


def test_it_can_be_printed() -> None:
    async def main() -> None:
        stage = Stage()
        microbatch = stage.microbatch()
        assert repr(microbatch) == "<Microbatch 12-0 of stage 0, waiting for its turn, 0.0 s>"
        microbatch.mark_onward()
        stage.now = 0.8
        assert repr(microbatch) == "<Microbatch 12-0 of stage 0, waiting for its gradient, 0.8 s>"

    run_virtual(main())
