"""A Mac's GPU is taken, and measured by what Metal holds; its memory is the host's, counted once. By a faked one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bootstrap.local.devices import devices_told
from node.machine.accelerator import give_back_cached, shares_memory, synchronize
from node.machine.limits import Room
from node.model import resources
from node.model.dry_run import MetalMeter, meter_of
from node.model.execution import choose_compilation, choose_execution, choose_precision, usable_on
from node.model.inner import _exact
from node.model.memory_model import memory_of_buffers, memory_of_state
from node.model.resources import GIB, memory_of, room_on
from node.model.snapshot import MetalCopier, copier_of
from node.model.transfer import DeviceTransfer, transfer_for
from node.process.serving import choose_device, devices_of
from node.watch.device_use import device_use
from protocol.errors import UserError
from protocol.run.manifest import load_preset

MPS = torch.device("mps:0")
MEMORY, RECOMMENDED = 32 * GIB, 21 * GIB


class Metal:
    """Metal's memory as torch tells of it. Mutable state: bytes in tensors, bytes kept beside them, and the calls."""

    def __init__(self) -> None:
        self.allocated = self.kept = 0
        self.calls: list[str] = []

    def take(self, count: int) -> None:
        reused = min(count, self.kept)
        self.allocated, self.kept = self.allocated + count, self.kept - reused

    def free(self, count: int) -> None:
        self.allocated, self.kept = self.allocated - count, self.kept + count

    def empty_cache(self) -> None:
        self.calls.append("empty")
        self.kept = 0


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Metal:
    """A Mac with 32 GiB of memory."""
    metal = Metal()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    told: dict[str, Callable[[], object]] = {
        "driver_allocated_memory": lambda: metal.allocated + metal.kept,
        "current_allocated_memory": lambda: metal.allocated,
        "recommended_max_memory": lambda: RECOMMENDED,
        "empty_cache": metal.empty_cache,
        "synchronize": lambda: metal.calls.append("wait"),
    }
    for name, function in told.items():
        monkeypatch.setattr(torch.mps, name, function)
    monkeypatch.setattr(resources, "host_room", lambda most=0: Room(MEMORY - 8 * GIB, MEMORY))
    monkeypatch.setattr(resources, "taken", lambda: 1 * GIB)
    return metal


@pytest.mark.usefixtures("metal")
def test_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == "mps:0"
    assert devices_of("all") == ["mps:0"]
    monkeypatch.setattr("bootstrap.local.devices.choose_device", lambda device: "mps:0")
    assert devices_told("auto")[1] == "The nodes compute on mps:0 (an Apple GPU)."
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"


def test_its_memory_is_the_hosts_and_counted_once(metal: Metal) -> None:
    assert shares_memory(MPS)
    assert shares_memory(torch.device("cpu"))
    assert not shares_memory(torch.device("cuda"))
    assert memory_of(MPS) == RECOMMENDED
    assert room_on(MPS).free == RECOMMENDED
    metal.take(2 * GIB)
    assert room_on(MPS).free == RECOMMENDED - 2 * GIB
    limited = room_on(MPS, 8 * GIB)
    assert (limited.free, limited.source) == (8 * GIB - 1 * GIB - 2 * GIB, "--max-memory")
    manifest = load_preset("llama-125m")
    tight = memory_of_state(manifest, 0) + memory_of_buffers(manifest, 0).total
    assert usable_on(MPS) == usable_on(torch.device("cpu"))
    of_mac, of_host = (choose_execution(manifest, 0, torch.device(d), tight + GIB) for d in ("mps", "cpu"))
    assert of_mac == of_host  # rounds' and messages' buffers are of the same memory


def test_a_dry_run_measures_what_metal_holds(metal: Metal) -> None:
    metal.take(100)
    metal.free(40)
    meter = meter_of(MPS)
    assert isinstance(meter, MetalMeter)
    meter.begin()  # gives back what is kept
    metal.take(500)
    metal.free(300)
    assert (meter.held(), meter.peak()) == (200, 500)
    assert metal.calls[:2] == ["wait", "empty"]


def test_caches_are_freed_and_waits_are_its_own(metal: Metal) -> None:
    metal.take(10)
    metal.free(10)
    give_back_cached()
    assert metal.kept == 0
    synchronize(MPS)
    assert metal.calls == ["empty", "wait"]


@pytest.mark.usefixtures("metal")
def test_it_computes_in_float32_unless_asked_and_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision(MPS, "auto") == "fp32"
    assert not choose_compilation(MPS, "auto")
    for is_new in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_, is_new=is_new: is_new)
        if is_new:
            assert choose_precision(MPS, "bf16") == "bf16"
        else:
            with pytest.raises(UserError, match="--precision fp32"):
                choose_precision(MPS, "bf16")


def test_a_snapshot_copies_whole_tensors_and_people_see_the_memory(metal: Metal) -> None:
    copier = copier_of(MPS)
    assert isinstance(copier, MetalCopier)
    assert -(-155_000_000 // copier.entries) == 3  # waits for a tensor of that many, not 9,500
    assert type(transfer_for(MPS)) is DeviceTransfer
    before = device_use(MPS, 1.0).memory
    metal.take(GIB)
    assert device_use(MPS, 1.0).memory - before == pytest.approx(GIB, rel=0.5)


def test_float64_is_of_the_host_where_the_device_has_none() -> None:
    there: Any = SimpleNamespace(device=MPS, cpu=lambda: torch.ones(3))
    assert _exact(there).dtype == torch.float64
