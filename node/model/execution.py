"""How a stage is computed: precision, recomputation, slices, compilation. The weights are float32 in any case."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from node.model.memory_model import (
    memory_of_buffers,
    memory_of_state,
    most_in_flight,
)
from node.model.memory_plan import Choice, by_formula, choose, ways
from protocol.errors import UserError
from protocol.manifest import Manifest

Precision = Literal["fp32", "bf16"]

COMPILERS = (os.environ.get("CXX", "g++"), "g++", "clang++")  # that torch.compile looks for


@dataclass(frozen=True)
class Execution:
    """`bf16` is torch's autocast over float32 weights.

    `recomputes` keeps only the inputs of layers for the backward pass and computes the rest again (Chen et al.,
    arXiv 1604.06174): a third more arithmetic, a tenth of the memory. `in_flight` is how many microbatches' fit.
    `at_once` sequences of a microbatch are computed together; 0 is all of them.
    """

    precision: Precision = "fp32"
    recomputes: bool = False
    compiles: bool = False
    in_flight: int = 1
    at_once: int = 0

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


def choose_precision(device: torch.device, wish: str) -> Precision:
    """With "auto" bf16 where the device is faster with it. Raises `UserError` where it has none."""
    if wish == "bf16" and device.type == "cuda" and not has_bf16(device):
        raise UserError(f"The device {device} has no bf16. Use --precision fp32, or auto.")
    return "bf16" if wish == "bf16" or (wish == "auto" and has_bf16(device)) else "fp32"


def require_compiler() -> None:
    if not any(map(shutil.which, COMPILERS)):
        raise UserError(
            "--compile needs a C++ compiler, and there is none here. Install one (Debian: apt-get install g++), "
            "or leave --compile out."
        )


def choose_execution(
    manifest: Manifest,
    stage: int,
    device: torch.device,
    free_bytes: int,
    precision: str = "auto",
    recompute: str = "auto",
    compiles: bool = False,
) -> Execution:
    """What the volunteer asked for, and of the rest what fits into `free_bytes`, by formula alone.

    Where nothing fits, the way that needs least. Raises `UserError` for a precision that the device lacks, and for
    compilation without a compiler.
    """
    if compiles:
        require_compiler()
    chosen = choose_precision(device, precision)
    room = free_bytes - memory_of_state(manifest, stage)
    if device.type == "cpu":
        room -= memory_of_buffers(manifest, stage).total
    allowed = list(ways(manifest, stage, recompute))
    choice = choose(manifest, stage, allowed, by_formula(manifest, stage, chosen), room)
    return executed(choice or Choice(allowed[-1], 1), chosen, compiles)


def executed(choice: Choice, precision: Precision, compiles: bool) -> Execution:
    return Execution(precision, choice.way.recomputes, compiles, choice.in_flight, choice.way.at_once)


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is faster there than float32: GPUs from compute capability 8.0 on. CPUs can do it, slowly."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def described(execution: Execution, manifest: Manifest, stage: int) -> str:
    """For people, at the start."""
    parts = [f"computes in {execution.precision}"]
    if execution.at_once:
        sequences = manifest.inner.sequences
        parts.append(
            f"computes a microbatch of {sequences} sequences {execution.at_once} at a time, since all at once "
            "do not fit into the memory"
        )
    if execution.recomputes:
        parts.append("computes activations twice instead of keeping them")
    if execution.in_flight < most_in_flight(manifest, stage):
        parts.append(f"keeps at most {execution.in_flight} microbatches in flight, as many as fit")
    if execution.compiles:
        parts.append("compiled; the first microbatch takes minutes")
    return ", ".join(parts)
