"""Devices by name, with the numbers that their makers publish; and this machine, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:  # names of devices are needed before a command imports torch
    import torch

    from protocol.manifest import Manifest

# Of the published arithmetic, what training a Llama reaches: an assumption, not a measurement of ours. Megatron-LM
# reports 44 to 52 % (arXiv 2104.04473, table 1) with long tuning; unfused kernels and small microbatches reach less.
EFFICIENCY = 0.35
GB = 10**9
MEASURED_TOKENS = 256  # in a layer of this machine's measurement; more changes little


@dataclass(frozen=True)
class Device:
    """`tflops` of bf16 with float32 sums, without sparsity; gigabytes a second; gigabytes; a GPU has its own."""

    name: str
    tflops: float
    bandwidth: float
    memory: float
    is_gpu: bool = True
    efficiency: float = EFFICIENCY


# NVIDIA's data sheets of A100, H100, H200, L40S, L4, A10 and RTX A6000, halved where they count with sparsity, and
# the white papers of GA102 and Ada for 3090, 4080 and 4090. The processor: 8 cores at 3 GHz, 32 float32 operations a
# cycle each (two AVX2 units), and two channels of DDR4-3200.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312, 2039, 80),
        Device("a100-40", 312, 1555, 40),
        Device("h100", 989, 3350, 80),
        Device("h200", 989, 4800, 141),
        Device("l40s", 362, 864, 48),
        Device("l4", 121, 300, 24),
        Device("a10", 125, 600, 24),
        Device("a6000", 155, 768, 48),
        Device("4090", 165, 1008, 24),
        Device("4080", 97.5, 717, 16),
        Device("3090", 71, 936, 24),
        Device("cpu", 0.77, 51, 32, is_gpu=False),
    )
}


def named(names: str) -> list[Device]:
    """The devices of "a100,4090". Raises `UserError` for an unknown name."""
    devices = []
    for name in filter(None, (part.strip().lower() for part in names.split(","))):
        if name not in DEVICES:
            raise UserError(f"The device {name!r} is unknown. Known devices: {', '.join(DEVICES)}.")
        devices.append(DEVICES[name])
    return devices


def measured_here(manifest: Manifest) -> Device:
    """This machine, timed on one layer forward and backward and on a pass over memory. Takes seconds."""
    import torch

    from node.model.resources import room_on
    from node.model.stage import Stage, work_of

    cuda = torch.cuda.is_available()
    where = torch.device("cuda" if cuda else "cpu")
    three = manifest.model.model_copy(update={"layers": 3})
    layer = manifest.model_copy(update={"stages": 3, "model": three})
    stage = Stage(layer, 1, initialise=False).to(where)
    tokens = min(MEASURED_TOKENS, manifest.data.sequence_tokens)
    inputs = torch.ones(1, tokens, manifest.model.hidden_size, device=where, requires_grad=True)

    def once() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
            stage(inputs).sum().backward()

    seconds = _fastest(once, where)
    passes = torch.empty(2**26, device=where)
    copying = _fastest(lambda: passes.mul_(1.0), where)
    short = layer.model_copy(update={"data": layer.data.model_copy(update={"sequence_tokens": tokens})})
    flops = 6 * work_of(short, 1) * tokens / seconds
    bandwidth = 2 * passes.nbytes / copying / GB
    return Device("here", flops / 1e12, bandwidth, room_on(where).free / GB, is_gpu=cuda, efficiency=1.0)


def _fastest(work: Callable[[], object], where: torch.device) -> float:
    """Seconds of the fastest of three, after one that warms up."""
    import torch

    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
