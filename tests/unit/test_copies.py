"""Work whose results arrive later gives the same numbers as work whose results are there at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from node.model.replica import Replica
from node.model.stage_work import CudaTransfer, DeviceTransfer, PendingResult, StageWork, copies_of
from protocol.codec import Encoded, as_read
from protocol.manifest import Manifest, load_preset

T = TypeVar("T")
CPU = torch.device("cpu")


class LateCopies(DeviceTransfer):
    """A device that is behind: what is copied to the host is read when it is fetched, in another thread."""

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        return lambda: tensor.detach().to("cpu", dtype)

    def landing(self, fetch: Callable[[], T]) -> PendingResult[T]:
        return PendingResult(fetch, at_once=False)


def manifest(codec: str) -> Manifest:
    tiny = load_preset("tiny")
    wire = tiny.wire.model_copy(update={"activations": codec, "gradients": codec})
    return tiny.model_copy(update={"stages": 2, "wire": wire})


async def microbatches(
    codec: str, copies: DeviceTransfer, device: str = "cpu"
) -> tuple[list[float], list[torch.Tensor]]:
    """Two of them through two stages: losses, and the parameter gradients of both stages."""
    torch.manual_seed(0)
    replicas = [Replica(manifest(codec), stage, device) for stage in (0, 1)]
    first, second = (StageWork(manifest(codec), replica.passes, copies) for replica in replicas)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 33), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        leaf, outputs, activations = first.forward(lambda i=inputs, n=labels: (i, n))  # type: ignore[misc]
        sent = await activations.landed()
        received = as_read(sent[0]).float(), as_read(sent[1]).long()
        loss, answer = await second.last_stage(lambda r=received: r).landed()  # type: ignore[misc]
        by_inputs = await first.backward(leaf, outputs, as_read(answer[0])).landed()
        assert by_inputs == []
        losses.append(loss)
    return losses, [replica.flat.gradients.cpu() for replica in replicas]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "eden4"])
def test_results_that_arrive_later_are_the_same(codec: str) -> None:
    losses, gradients = asyncio.run(microbatches(codec, DeviceTransfer(CPU)))
    later, late_gradients = asyncio.run(microbatches(codec, LateCopies(CPU)))
    assert later == losses
    for one, other in zip(gradients, late_gradients, strict=True):
        assert torch.equal(one, other)
        assert float(one.abs().max()) > 0


def test_a_failure_on_the_way_is_raised_where_it_is_awaited() -> None:
    def broken() -> list[Encoded]:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        asyncio.run(PendingResult(broken, at_once=False).landed())


def test_only_a_gpu_gets_streams() -> None:
    assert type(copies_of(CPU)) is DeviceTransfer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_gpu_gives_the_cpus_numbers(codec: str) -> None:
    losses, gradients = asyncio.run(microbatches(codec, DeviceTransfer(CPU)))
    device = torch.device("cuda")
    there, gradients_there = asyncio.run(microbatches(codec, CudaTransfer(device), "cuda"))
    assert there == pytest.approx(losses, abs=2e-3)
    for one, other in zip(gradients, gradients_there, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
