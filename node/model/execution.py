"""How a stage is computed: precision, recomputation, compilation. The weights are float32 in any case."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from node.machine.resources import (
    least_in_flight,
    memory_of_activations,
    memory_of_state,
    most_in_flight,
    size,
)
from protocol.errors import UserError
from protocol.manifest import Manifest

COMPILERS = (os.environ.get("CXX", "g++"), "g++", "clang++")  # that torch.compile looks for
# of the memory that is left beside the state, for activations: kernels and the allocator need some of their own
USABLE = 0.8


@dataclass(frozen=True)
class Execution:
    """`bf16` is torch's autocast over float32 weights.

    `recomputes` keeps only the inputs of layers for the backward pass and computes the rest again (Chen et al.,
    arXiv 1604.06174): a third more arithmetic, a tenth of the memory. `in_flight` is how many microbatches' fit.
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    recomputes: bool = False
    compiles: bool = False
    in_flight: int = 1

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


def choose_execution(
    manifest: Manifest,
    stage: int,
    device: torch.device,
    free_bytes: int,
    precision: str = "auto",
    recompute: str = "auto",
    compiles: bool = False,
) -> Execution:
    """What the volunteer asked for; with "auto" bf16 where the device has it, and recomputation where the activations
    of the least microbatches in flight would not fit into `free_bytes` beside the stage's state. As many are in
    flight as fit. Raises `UserError` for a precision that the device lacks, and for compilation without a compiler.
    """
    if compiles and not any(map(shutil.which, COMPILERS)):
        raise UserError(
            "--compile needs a C++ compiler, and there is none here. Install one (Debian: apt-get install g++), "
            "or leave --compile out."
        )
    if precision == "auto":
        precision = "bf16" if has_bf16(device) else "fp32"
    elif precision == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise UserError(f"The device {device} has no bf16. Use --precision fp32, or auto.")
    room = (free_bytes - memory_of_state(manifest, stage)) * USABLE
    least = least_in_flight(manifest, stage)
    needed = memory_of_activations(manifest, stage, least)
    recomputes = recompute == "on" or (recompute == "auto" and needed > room)
    one, two = (memory_of_activations(manifest, stage, count, recomputes) for count in (1, 2))
    fitting = 1 + int((room - one) // (two - one))
    in_flight = max(least, min(fitting, most_in_flight(manifest, stage)))
    return Execution("bf16" if precision == "bf16" else "fp32", recomputes, compiles, in_flight)


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is faster there than float32: GPUs from compute capability 8.0 on. CPUs can do it, slowly."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def described(execution: Execution, manifest: Manifest, stage: int) -> str:
    """For people, at the start."""
    parts = [f"computes in {execution.precision}"]
    if execution.recomputes:
        kept = size(memory_of_activations(manifest, stage, execution.in_flight))
        parts.append(f"computes activations twice instead of keeping {kept} of them")
    if execution.in_flight < most_in_flight(manifest, stage):
        parts.append(f"keeps at most {execution.in_flight} microbatches in flight, as many as fit")
    if execution.compiles:
        parts.append("compiled; the first microbatch takes minutes")
    return ", ".join(parts)
