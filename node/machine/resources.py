"""Whether this machine can hold a stage, told before anything is allocated."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import torch

from node.model.stage import parameter_count
from protocol.errors import ResourceError
from protocol.manifest import Manifest

# float32 copies of the stage: θ, gradients, φ, δ, two moments, own and the partner's z
COPIES_IN_MEMORY = 8
COPIES_ON_DISK = 10  # a checkpoint holds five; the old one stays until the new one is whole
GIB = 2**30


def memory_needed(manifest: Manifest, stage: int, recomputes: bool = False) -> int:
    """Bytes for the stage's state and for the activations of the least microbatches in flight."""
    least = least_in_flight(manifest, stage)
    return memory_of_state(manifest, stage) + memory_of_activations(manifest, stage, least, recomputes)


def memory_of_state(manifest: Manifest, stage: int) -> int:
    """Bytes of weights, gradients, optimizer and averaging."""
    return parameter_count(manifest, stage) * 4 * COPIES_IN_MEMORY


def most_in_flight(manifest: Manifest, stage: int) -> int:
    """Microbatches that may be between their forward and backward passes: the last hop's stage runs both at once."""
    if stage == manifest.hops - 1:
        return 1
    return manifest.inner.microbatches * (1 + manifest.inner.staleness)


def least_in_flight(manifest: Manifest, stage: int) -> int:
    """As many as keep all stages busy: one in each from here on, and one on each way between them."""
    return min(most_in_flight(manifest, stage), 2 * (manifest.hops - 1 - stage) + 1)


def memory_of_activations(manifest: Manifest, stage: int, in_flight: int, recomputes: bool = False) -> int:
    """Bytes kept for the backward passes of so many microbatches.

    With `recomputes` those are the inputs of layers, and one layer's activations at a time.
    """
    model = manifest.model
    layers, has_head = len(manifest.layers_of(stage)), stage == manifest.head_stage
    # kept for backward per layer: about 34 values per token and hidden unit (Korthikanti et al., arXiv
    # 2205.05198, eq. 1, fp16 bytes), and attention in blocks keeps no score matrix
    per_layer = manifest.tokens_per_microbatch * model.hidden_size * 34 * 2
    kept = manifest.tokens_per_microbatch * model.hidden_size * 4 if recomputes else per_layer
    activations = in_flight * layers * kept + (per_layer if recomputes else 0)
    if has_head:
        activations += manifest.tokens_per_microbatch * model.vocab_size * 4 * 3
    return activations


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses at present, of the device's own memory where it has some."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def require_memory(
    manifest: Manifest, stage: int, available: int | None = None, recomputes: bool = False
) -> None:
    """Raises `ResourceError` when the stage does not fit into the memory that is free now."""
    needed = memory_needed(manifest, stage, recomputes)
    free = psutil.virtual_memory().available if available is None else available
    if needed > free:
        raise ResourceError(
            f"Stage {stage} of run '{manifest.name}' needs {size(needed)} of memory, but "
            f"{size(free)} are free. Close other programs, use a larger machine, or ask the run's "
            "owner for more, smaller stages."
        )


def stages_that_fit(manifest: Manifest, available: int, recomputes: bool = False) -> list[int]:
    """The stages that a machine with so many bytes of memory could hold."""
    return [s for s in range(manifest.stages) if memory_needed(manifest, s, recomputes) <= available]


def require_disk(manifest: Manifest, stage: int, directory: Path, free: int | None = None) -> None:
    """Raises `ResourceError` when checkpoints of the stage do not fit."""
    needed = parameter_count(manifest, stage) * 4 * COPIES_ON_DISK
    free = shutil.disk_usage(directory).free if free is None else free
    if needed > free:
        raise ResourceError(
            f"Checkpoints of stage {stage} need {size(needed)} in {directory}, but "
            f"{size(free)} are free. Free some space or choose another disk with --state-dir."
        )


def size(count: int) -> str:
    """Bytes for people: "85.3 GiB", "5.6 MiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
