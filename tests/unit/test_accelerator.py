"""What a node asks of GPUs of several makers, by faked ones."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.machine import accelerator
from node.machine.accelerator import has_bf16
from node.machine.devices import DEVICES, DRIVERS_NAMES, peak_of, watts_of
from node.machine.duty import Duty
from node.model import head_loss
from node.model.compute import ComputeThread
from node.model.fragment import Fragment, Weights
from node.model.head_loss import chunks_of, logits_bytes
from node.model.muon import Muon
from node.model.outer import OuterSettings
from node.model.replica import Replica
from node.model.snapshot import CudaCopier
from node.model.transfer import CudaTransfer
from node.pipeline.gradient_screen import norm_of
from tests.swarm.micro import micro_manifest

SECOND = torch.device("cuda:1")


@pytest.mark.parametrize(
    ("architecture", "is_fast"),
    [
        ("gfx1030", False),
        ("gfx906", False),
        ("gfx90a:sramecc+:xnack-", True),
        ("gfx942", True),
        ("gfx1100", True),
    ],
)
def test_bf16_of_amd_goes_by_its_architecture(
    architecture: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))  # as RDNA 2 says
    assert has_bf16(SECOND) == is_fast


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 6), torch.bfloat16)])
def test_muon_takes_bf16_where_it_is_fast_alone(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    place = SimpleNamespace(shape=(4, 4), of=lambda flat: None)
    flat = SimpleNamespace(values=SimpleNamespace(device=SECOND, is_cuda=True), gradients=None)
    inner: Any = SimpleNamespace(weight_decay=0.1, muon_learning_rate=0.0, learning_rate=0.1)
    assert Muon(inner, [place], flat, None)._dtype == dtype  # type: ignore[list-item, arg-type]


def test_a_share_of_the_second_gpu_waits_for_the_second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(("use", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("wait", device)))
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    accelerator.use(SECOND)
    thread = ComputeThread.__new__(ComputeThread)
    thread._device, thread.duty = SECOND, Duty(0.5)
    thread._finish_on_device()
    thread.duty = Duty(1.0)
    thread._finish_on_device()
    assert asked == [("use", SECOND), ("wait", SECOND)]


def test_chunks_of_logits_on_a_gpu_are_whole_tiles() -> None:
    """Of a vocabulary of 128,128 rows: 2,095 tokens would be one tile more, and other code for the rest."""
    chunks = chunks_of(8192, 128_128, SECOND)
    assert [chunk.stop - chunk.start for chunk in chunks] == [2048] * 4
    assert logits_bytes(8192, 128_002, "bf16") == 2048 * 128_128 * 8
    assert chunks_of(8192, 128_128, torch.device("cpu"))[0].stop == head_loss.LEAST_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_norm_of_a_gradient(dtype: torch.dtype) -> None:
    gradient = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert norm_of(gradient) == pytest.approx(float(gradient.double().norm()), rel=5e-3)
    assert norm_of(1e-10 * gradient.float().to(torch.bfloat16)) > 0
    for poison in (torch.nan, torch.inf):
        gradient[1, 2, 3] = poison
        assert not norm_of(gradient) < torch.inf
    assert norm_of(torch.zeros(2, 3, 4, dtype=dtype)) == 0


def test_the_loop_takes_the_norm_of_bf16_without_a_copy_in_float32() -> None:
    gradient = torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    made = list[torch.dtype]()

    class Made(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            made.extend([found.dtype] if isinstance(found, torch.Tensor) else [])
            return found

    with Made():
        norm_of(gradient)
    assert torch.float32 not in made


def events(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each event made from now on lets its waiter sleep."""
    kinds: list[bool] = []

    def made(blocking: bool = False) -> Any:
        kinds.append(blocking)
        return SimpleNamespace(record=lambda _: None, synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "Event", made)
    return kinds


def test_who_awaits_a_copy_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, empty = events(monkeypatch), torch.empty
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    copy = CudaTransfer(SECOND).to_host(torch.ones(3))
    assert copy.wait().tolist() == [1, 1, 1]
    assert kinds == [True]


def test_a_refusal_to_pin_memory_is_cleared_before_training_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.device] = []

    def launch(_: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: invalid argument")  # the refusal, which a launch reports

    copier = CudaCopier.__new__(CudaCopier)
    copier._device = SECOND
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 1))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch, "zeros", launch)
    assert copier.room(8).numel() == 8
    assert launched == [SECOND]


def test_an_outer_step_is_compiled_where_its_stage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr("node.model.outer.fused_on", asked.append)
    theta, phi, delta = torch.ones(3, 8)
    settings = OuterSettings(0.5, 0.7, 0.7)
    own = Fragment(Weights(theta, phi, delta), slice(0, 8), [], theta.__getitem__, settings)
    own.steps_at_once = True
    own.step_alone()
    assert asked == []
    own.compiles = True
    own.step_alone()
    assert asked == [torch.device("cpu")]


def test_the_mean_and_the_clipping_are_one_pass_over_the_gradients() -> None:
    replica, passes = Replica(micro_manifest(stages=2), 0), list[str]()
    replica.flat.gradients.fill_(3.0)  # is clipped

    class Passes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith(("aten.mul_", "aten.div_")) and args[0].numel() == replica.parameters:
                passes.append(str(func))
            return func(*args, **(kwargs or {}))

    with Passes():
        report = replica.inner_step(2)
    assert passes == ["aten.mul_.Tensor"]
    assert report.gradient_norm == pytest.approx(1.5 * replica.parameters**0.5)


def test_devices_of_2026_are_known_by_what_their_drivers_call_them() -> None:
    assert set(DRIVERS_NAMES.values()) <= DEVICES.keys()
    assert watts_of("NVIDIA GeForce RTX 5090") == 575
    assert peak_of("AMD Instinct MI355X") == 2517e12
    assert peak_of("NVIDIA B200") == 2250e12
    assert peak_of("NVIDIA GeForce RTX 3080") is None  # of 10 GB or of 12
