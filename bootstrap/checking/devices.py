"""How fast named devices would train a stage, from their published numbers; or this machine, measured.

A token costs 6 operations for each multiplication of the forward pass: a multiplication and an addition, three times.
An inner step also reads and writes the stage's weights, gradients and moments, eight float32 passes in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bootstrap.checking.known_devices import GB, Device
from node.model.memory_model import (
    MicrobatchBytes,
    estimated,
    least_in_flight,
    memory_of_buffers,
    memory_of_state,
)
from node.model.resources import least_memory, room_on
from node.model.stage import Stage, work_of
from protocol.manifest import Manifest

OPTIMIZER_PASSES = 8
# A GPU takes so long to start a kernel, and a layer forward and backward is about so many: small models wait for
# that. Assumptions, too.
LAUNCH_SECONDS = 5e-6
KERNELS_PER_LAYER = 100
MEASURED_TOKENS = 256  # in a layer of this machine's measurement; more changes little


@dataclass(frozen=True)
class Speed:
    """One stage on one device: how it fits, and tokens a second of one replica that never waits for another."""

    stage: int
    fits: str  # "whole", "smaller" or "no"
    tokens_per_second: float


@dataclass(frozen=True)
class DeviceReport:
    device: Device
    stages: tuple[Speed, ...]

    @property
    def slowest(self) -> float:
        """Of a pipeline with such a device at each stage; 0 when one of them does not fit."""
        return min(0.0 if stage.fits == "no" else stage.tokens_per_second for stage in self.stages)


def report_of(manifest: Manifest, device: Device) -> DeviceReport:
    return DeviceReport(device, tuple(speed_of(manifest, stage, device) for stage in range(manifest.stages)))


def speed_of(manifest: Manifest, stage: int, device: Device) -> Speed:
    work = 6 * work_of(manifest, stage) / (device.tflops * 1e12 * device.efficiency)
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch
    weights = memory_of_state(manifest, stage) / 6
    stepping = weights * OPTIMIZER_PASSES / (device.bandwidth * GB) / tokens
    launches = KERNELS_PER_LAYER * len(manifest.layers_of(stage)) if device.is_gpu else 0
    starting = launches * LAUNCH_SECONDS / manifest.tokens_per_microbatch
    return Speed(stage, fit_of(manifest, stage, device), 1 / (max(work, starting) + stepping))


def fit_of(manifest: Manifest, stage: int, device: Device) -> str:
    """By formula: "whole" microbatches with nothing computed twice, "smaller" ones, or "no"."""
    memory = device.memory * GB
    if least_memory(manifest, stage, on_host=not device.is_gpu) > memory:
        return "no"
    cost: MicrobatchBytes = estimated(
        manifest, stage, manifest.inner.sequences, False, "bf16" if device.is_gpu else "fp32"
    )
    whole = memory_of_state(manifest, stage) + cost.of(least_in_flight(manifest, stage)) / 0.8
    if not device.is_gpu:
        whole += memory_of_buffers(manifest, stage).total
    return "whole" if whole <= memory else "smaller"


def measured_here(manifest: Manifest) -> Device:
    """This machine: one layer of the model forward and backward, and a pass over memory. Takes seconds."""
    cuda = torch.cuda.is_available()
    where = torch.device("cuda" if cuda else "cpu")
    layer = manifest.model_copy(
        update={"stages": 3, "model": manifest.model.model_copy(update={"layers": 3})}
    )
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
    """Of three, after one that warms up."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
