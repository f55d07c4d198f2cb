"""Ways to compute a stage, and the choice of one that fits a memory. The weights are float32 in any case.

The run fixes how many sequences a microbatch has. A device too small for one first keeps fewer microbatches in
flight, then computes activations again instead of keeping them, then takes a microbatch in slices of fewer sequences;
the result is the same but for rounding. Each is slower than the one before it, so the first that fits is taken. At
the last stage slices cost no arithmetic, since no graph is kept between the passes, and come before recomputation.
In a ring there is no such stage: what the last one computes goes on to the first one's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

from node.machine.accelerator import can_bf16, has_bf16, shares_memory
from node.model.compilers import compiler_missing
from node.model.memory_model import (
    MicrobatchBytes,
    Precision,
    estimated,
    least_in_flight,
    memory_of_buffers,
    memory_of_state,
    most_in_flight,
    sliced,
)
from protocol.errors import UserError
from protocol.run.manifest import Manifest

# Of the memory that is left, for activations: what is freed leaves gaps, and kernels need some of their own. On a GPU
# torch's allocator counts its gaps, and they are in what was measured.
USABLE, USABLE_OF_GPU = 0.8, 0.92


@dataclass(frozen=True)
class Execution:
    """A way to compute: `bf16` is torch's autocast over bf16 copies of the float32 weights (working.py).

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


@dataclass(frozen=True)
class ExecutionMode:
    """A way of computing: `at_once` sequences are computed together, of a whole microbatch where it is 0."""

    recomputes: bool
    at_once: int
    least: int  # microbatches in flight, or the next way is better


@dataclass(frozen=True)
class Choice:
    way: ExecutionMode
    in_flight: int


CostOf: TypeAlias = Callable[[ExecutionMode], MicrobatchBytes | None]  # None: it cannot be had


def modes(manifest: Manifest, stage: int, recompute: str = "auto") -> Iterator[ExecutionMode]:
    """All ways that the volunteer's `recompute` ("auto", "on", "off") allows, the fastest first."""
    least = least_in_flight(manifest, stage)
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[recompute]
    slices = slices_of(manifest.inner.sequences)
    if stage == manifest.hops - 1:
        yield from (ExecutionMode(recomputes, at_once, 1) for recomputes in again for at_once in (0, *slices))
        return
    yield from (ExecutionMode(recomputes, 0, least) for recomputes in again)
    if recompute == "off":  # slices run forward twice
        yield ExecutionMode(False, 0, 1)
        return
    yield from (ExecutionMode(recomputes, at_once, least) for recomputes in again for at_once in slices)
    yield from (ExecutionMode(True, at_once, 1) for at_once in (0, *slices))


def slices_of(sequences: int) -> list[int]:
    """Sizes that cut a microbatch into 2, 3, … equal parts, the largest first."""
    return sorted({-(-sequences // parts) for parts in range(2, sequences + 1)}, reverse=True)


def usable_on(device: torch.device) -> float:
    return USABLE_OF_GPU if device.type == "cuda" else USABLE


def choose(
    manifest: Manifest,
    stage: int,
    modes: Sequence[ExecutionMode],
    cost_of: CostOf,
    room: int,
    share: float = USABLE,
) -> Choice | None:
    """Choose the first way of which enough microbatches fit into that `share` of `room` bytes, and as many as do.

    None if there is none.
    """
    usable, most = int(room * share), most_in_flight(manifest, stage)
    for way in modes:
        cost = cost_of(way)
        if cost is None or cost.peak > usable:
            continue
        fitting = most if not cost.kept else 1 + (usable - cost.peak) // cost.kept
        if fitting >= way.least:
            return Choice(way, min(fitting, most))
    return None


def by_formula(
    manifest: Manifest, stage: int, precision: Precision
) -> Callable[[ExecutionMode], MicrobatchBytes]:
    """Return a function that estimates the cost of each way by formula, before anything was measured."""

    def cost_of(way: ExecutionMode) -> MicrobatchBytes:
        sequences = way.at_once or manifest.inner.sequences
        cost = estimated(manifest, stage, sequences, way.recomputes, precision)
        return sliced(manifest, stage, cost.peak) if way.at_once else cost

    return cost_of


def least_activations(
    manifest: Manifest, stage: int, recompute: str = "auto", precision: Precision = "fp32"
) -> int:
    """Bytes that must be left for activations, or no way fits, by formula."""
    cost_of = by_formula(manifest, stage, precision)
    return int(min(cost_of(way).peak for way in modes(manifest, stage, recompute) if way.least == 1) / USABLE)


def choose_precision(device: torch.device, wish: str) -> Precision:
    """Choose the precision; "auto": bf16 where the device is faster with it. Raises `UserError` if it has none."""
    if wish == "bf16" and not can_bf16(device):
        raise UserError(f"The device {device} has no bf16. Use --precision fp32, or auto.")
    return "bf16" if wish == "bf16" or (wish == "auto" and has_bf16(device)) else "fp32"


def choose_compilation(device: torch.device, wish: str) -> bool:
    """Return whether to compile; "auto": on GPUs with all that it takes. Raises `UserError` for "on" without."""
    if wish == "off" or (wish == "auto" and device.type != "cuda"):
        return False
    missing = compiler_missing(device.type)
    if wish == "on" and missing:
        raise UserError(f"--compile on cannot compile. {missing} Or use --compile auto.")
    return not missing


def why_not_compiled(device: torch.device, wish: str) -> str:
    """Return what keeps "auto" from compiling on a GPU, and the command that mends it, for people; '' if nothing."""
    missing = compiler_missing(device.type) if wish == "auto" and device.type == "cuda" else ""
    return missing and f"The stage is not compiled, and trains at about half the speed. {missing}"


def choose_execution(
    manifest: Manifest,
    stage: int,
    device: torch.device,
    free_bytes: int,
    precision: str = "auto",
    recompute: str = "auto",
    compile: str = "off",
) -> Execution:
    """Choose what the volunteer asked for, and of the rest what fits into `free_bytes`, by formula alone.

    `free_bytes` are those before the replica is made: its weights and momenta are subtracted here.
    Where nothing fits, it is the way that needs least. Raises `UserError` for a precision that the device lacks, and
    for compilation without a compiler.
    """
    compiles = choose_compilation(device, compile)
    chosen = choose_precision(device, precision)
    room = free_bytes - memory_of_state(manifest, stage, chosen)
    if shares_memory(device):
        room -= memory_of_buffers(manifest, stage).total
    allowed = list(modes(manifest, stage, recompute))
    choice = choose(manifest, stage, allowed, by_formula(manifest, stage, chosen), room, usable_on(device))
    return execution_of(choice or Choice(allowed[-1], 1), chosen, compiles)


def execution_of(choice: Choice, precision: Precision, compiles: bool) -> Execution:
    return Execution(precision, choice.way.recomputes, compiles, choice.in_flight, choice.way.at_once)


def described(execution: Execution, manifest: Manifest, stage: int) -> str:
    """Describe the way of computing for people, at the start."""
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
        parts.append("compiled")
    return ", ".join(parts)
