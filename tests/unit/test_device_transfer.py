"""Work whose results arrive later gives the same numbers as work whose results are there at once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from bootstrap.lab.in_memory.virtual_time import run_virtual
from node.model.dry_run import dry_run
from node.model.replica import Replica
from node.model.stage_work import StageWork
from node.model.transfer import CudaTransfer, Deferred, DeviceTransfer, Pending, transfer_for
from node.pipeline.incoming import IncomingTensors
from node.process.serving import choose_device
from protocol.codecs.codec import Encoded, as_read, encode
from protocol.errors import NonFinite, Refused
from protocol.messages import Message
from protocol.rpc.rpc import Request
from protocol.run.manifest import Manifest, load_preset

T = TypeVar("T")
CPU = torch.device("cpu")


class LateTransfer(DeviceTransfer):
    """A device that is behind: what is copied to the host is read when it is awaited, in another thread."""

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Pending[torch.Tensor]:
        return Deferred(lambda: tensor.detach().to("cpu", dtype))

    def hand_over(self, result: Pending[T]) -> Pending[T]:
        return result


class EncodingTransfer(LateTransfer):
    """As a GPU: what is sent and received is encoded and decoded where it was computed."""

    encodes_there = True


def manifest(codec: str) -> Manifest:
    tiny = load_preset("tiny")
    wire = tiny.wire.model_copy(update={"activations": codec, "gradients": codec})
    return tiny.model_copy(update={"stages": 2, "wire": wire})


async def microbatches(
    codec: str, transfer: DeviceTransfer, device: str = "cpu"
) -> tuple[list[float], list[torch.Tensor]]:
    """Two of them through two stages: losses, and the parameter gradients of both stages."""
    torch.manual_seed(0)
    replicas = [Replica(manifest(codec), stage, device) for stage in (0, 1)]
    first, second = (StageWork(manifest(codec), replica.passes, transfer) for replica in replicas)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 33), generator=generator)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        leaf, outputs, activations = first.forward(inputs, labels)
        sent = await activations.result()
        loss, answer = await second.last_stage(as_read(sent[0]).float(), as_read(sent[1]).long()).result()
        assert await first.backward(leaf, outputs, as_read(answer[0]), loss).result() == (loss, [])
        losses.append(loss)
    return losses, [replica.flat.gradients.cpu() for replica in replicas]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "eden4"])
def test_results_that_arrive_later_are_the_same(codec: str) -> None:
    losses, gradients = run_virtual(microbatches(codec, DeviceTransfer(CPU)))
    later, late_gradients = run_virtual(microbatches(codec, LateTransfer(CPU)))
    assert later == losses
    for one, other in zip(gradients, late_gradients, strict=True):
        assert torch.equal(one, other)
        assert float(one.abs().max()) > 0


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_what_a_device_encodes_and_decodes_is_the_same(codec: str) -> None:
    losses, gradients = run_virtual(microbatches(codec, DeviceTransfer(CPU)))
    there, gradients_there = run_virtual(microbatches(codec, EncodingTransfer(CPU)))
    assert there == losses
    for one, other in zip(gradients, gradients_there, strict=True):
        assert torch.equal(one, other)


def test_what_a_device_rotates_is_the_same_but_for_values_at_a_bound() -> None:
    losses, gradients = run_virtual(microbatches("eden4", DeviceTransfer(CPU)))
    there, gradients_there = run_virtual(microbatches("eden4", EncodingTransfer(CPU)))
    assert there == pytest.approx(losses, abs=1e-4)
    for one, other in zip(gradients, gradients_there, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.9999


def at_second_stage(transfer: DeviceTransfer, codec: str) -> IncomingTensors:
    return IncomingTensors(manifest(codec), Replica(manifest(codec), 1).stage, transfer)


def asked(activations: torch.Tensor, codec: str) -> Request[Message]:
    """A microbatch of one sequence for the second stage, as it comes."""
    labels = torch.arange(activations.shape[1], dtype=torch.int32)[None] % 256
    tensors = [encode(activations, codec), encode(labels, "int32")]
    request: Any = SimpleNamespace(encoded=lambda: [Encoded(t.codec, t.shape, t.buffers) for t in tensors])
    return cast(Request[Message], request)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "eden4", "int32"])
def test_received_activations_are_read_the_same_on_a_device(codec: str) -> None:
    tiny = load_preset("tiny")
    shape = 1, tiny.data.sequence_tokens, tiny.model.hidden_size
    activations = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    if codec == "int32":  # no codec that a run has for them, and no mistake either
        activations = activations.to(torch.int32)
    (here, labels), (there, labels_there) = (
        at_second_stage(transfer(CPU), codec if codec != "int32" else "fp32").read(asked(activations, codec))
        for transfer in (DeviceTransfer, EncodingTransfer)
    )
    assert torch.equal(labels, labels_there)
    assert here.dtype == there.dtype == torch.float32
    assert torch.allclose(here, there, rtol=0, atol=1e-5 if codec == "eden4" else 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("transfer", [DeviceTransfer, EncodingTransfer])
def test_received_activations_that_are_not_finite_are_refused(
    transfer: type[DeviceTransfer], bad: float
) -> None:
    tiny = load_preset("tiny")
    activations = torch.zeros(1, tiny.data.sequence_tokens, tiny.model.hidden_size)
    activations[0, 3, 5] = bad
    for codec in ("fp32", "bf16"):
        with pytest.raises(Refused, match="NaN or infinity"):
            at_second_stage(transfer(CPU), codec).read(asked(activations, codec))


@pytest.mark.parametrize("transfer", [DeviceTransfer, EncodingTransfer])
@pytest.mark.parametrize(
    ("codec", "value", "overflows"),
    [("fp32", math.nan, ""), ("bf16", math.inf, ""), ("fp16", math.nan, ""), ("fp16", 1e5, "fp16"),
     ("int8", math.nan, ""), ("eden4", 1e36, "eden4")],
)  # fmt: skip
def test_what_cannot_be_sent_is_told_with_its_cause(
    transfer: type[DeviceTransfer], codec: str, value: float, overflows: str
) -> None:
    """An embedding of `value`, through no layer."""
    replica = Replica(manifest(codec), 0)
    replica.stage.layers.clear()
    with torch.no_grad():
        replica.stage.embed_tokens.weight.fill_(value)
    work = StageWork(manifest(codec), replica.passes, transfer(CPU))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(NonFinite) as refusal:
        run_virtual(sent(work, tokens))
    assert refusal.value.overflows == overflows


async def sent(work: StageWork, tokens: torch.Tensor) -> list[Encoded]:
    return await work.forward(tokens, tokens)[2].result()


def test_without_memory_to_encode_there_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected, _ = run_virtual(microbatches("int8", DeviceTransfer(CPU)))
    monkeypatch.setattr("node.model.stage_work.packed", fails)
    assert run_virtual(microbatches("int8", EncodingTransfer(CPU)))[0] == expected


def test_a_failure_on_the_way_is_raised_where_it_is_awaited() -> None:
    def broken() -> list[Encoded]:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        run_virtual(Deferred(broken).result())


def test_only_a_gpu_gets_streams() -> None:
    assert type(transfer_for(CPU)) is DeviceTransfer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_that_is_named_without_its_index_may_be_shared() -> None:
    assert choose_device("auto") == choose_device("cuda") == "cuda:0"
    replica = Replica(load_preset("tiny"), 0, choose_device("cuda"))
    try:
        assert dry_run(replica, "auto", 2**32).room <= 2**32
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_gpu_gives_the_cpus_numbers(codec: str) -> None:
    losses, gradients = run_virtual(microbatches(codec, DeviceTransfer(CPU)))
    device = torch.device("cuda")
    there, gradients_there = run_virtual(microbatches(codec, CudaTransfer(device), "cuda"))
    assert there == pytest.approx(losses, abs=2e-3)
    for one, other in zip(gradients, gradients_there, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
