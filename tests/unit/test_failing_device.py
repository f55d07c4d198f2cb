"""Memory of a device that runs out, by any words, costs a retry; a device that has failed ends the node."""

from __future__ import annotations

import asyncio

import pytest
import torch

from node.model import resources
from node.model.compute import InlineCompute, Priority
from node.model.execution import Execution
from node.model.replica import Replica
from node.model.resources import has_lost_device, is_out_of_memory, named, retried
from node.model.stage_work import StageWork
from node.model.transfer import Deferred, transfer_for
from protocol.errors import DeviceFailed, OutOfMemory
from tests.swarm.micro import micro_manifest

NO_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 23.64 GiB",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory (MPS allocated: 17.9 GB)",
    "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory",
]
DEAD = [
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: misaligned address",
    "CUDA error: unknown error",
    "HIP error: unspecified launch failure",
    "NVML: GPU is lost (Xid 79)",
]
OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "CUDA error: invalid configuration argument",
    "an unknown error of a file",
]


@pytest.mark.parametrize("words", NO_MEMORY)
def test_memory_that_runs_out_by_any_name_costs_one_retry(words: str) -> None:
    calls = 0

    def work() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError(words)
        return "done"

    assert retried(work) == "done"
    assert not has_lost_device(RuntimeError(words))
    assert isinstance(named(RuntimeError(words)), OutOfMemory)


@pytest.mark.parametrize("words", DEAD)
def test_a_device_that_has_failed_is_told_from_memory(words: str) -> None:
    error = RuntimeError(words)
    assert has_lost_device(error)
    assert not is_out_of_memory(error)
    told = str(named(error))
    assert told.startswith(f"The device that computes has failed ({words.splitlines()[0]})")
    assert "Start it again" in told


@pytest.mark.parametrize("words", OTHERS)
def test_any_other_error_stays_what_it_is(words: str) -> None:
    error = RuntimeError(words)
    assert named(error) is error
    assert not isinstance(named(MemoryError()), DeviceFailed)


def test_a_dead_device_that_says_at_first_that_it_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(DEAD[0])

    monkeypatch.setattr(resources, "free_caches", fail)
    assert isinstance(named(RuntimeError(NO_MEMORY[3])), DeviceFailed)


async def test_once_it_has_failed_nothing_is_asked_of_it() -> None:
    ended: list[BaseException] = []
    compute = InlineCompute(lambda _: 0.1)
    compute.end_node = ended.append

    def fail() -> None:
        raise RuntimeError(DEAD[0])

    with pytest.raises(DeviceFailed):
        await compute.run(Priority.FORWARD, fail)
    with pytest.raises(DeviceFailed):
        await compute.run(Priority.SERVE, lambda: None)
    assert len(ended) == 1
    with pytest.raises(DeviceFailed):  # found where a copy is awaited
        await Deferred(fail).result()
    await asyncio.sleep(0)
    await compute.close()


def test_where_memory_lacks_for_a_self_check_it_is_left_out_and_nothing_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = micro_manifest(stages=2)
    replica = Replica(manifest, 0)
    replica.passes.execute(Execution(in_flight=3))
    work = StageWork(manifest, replica.passes, transfer_for(replica.device))
    work.self_check.doubt()  # one in four
    forward, calls = replica.passes.forward, 0

    def second_graph_does_not_fit(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise torch.OutOfMemoryError
        return forward(inputs)

    monkeypatch.setattr(replica.passes, "forward", second_graph_does_not_fit)
    tokens = torch.zeros(manifest.inner.sequences, manifest.data.sequence_tokens, dtype=torch.long)
    for _ in range(4):
        work.forward(tokens, tokens)
    assert calls == 6  # tried, and once more with caches emptied
    assert (work.self_check.compared, work.self_check.skipped) == (0, 1)
    assert replica.passes.execution.in_flight == 3
