"""Tells whether this machine can hold a stage, before anything is allocated; and copes when memory runs out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
import torch

from node.machine.accelerator import give_back_cached, most_for_metal, taken_by_metal
from node.machine.limits import Room, give_back_freed_memory, host_room, size, taken
from node.model.execution import least_activations
from node.model.memory_model import estimated, least_in_flight, memory_of_buffers, memory_of_state
from node.model.stage import parameter_count
from protocol.errors import DeviceFailed, OutOfMemory, ResourceError, legible
from protocol.run.manifest import Manifest

P = ParamSpec("P")
T = TypeVar("T")

TENSORS_OF_CHECKPOINT = 5  # θ, φ, δ and AdamW's two moments, float32
CHECKPOINTS = 2  # of a stage on the disk at once: the old one stays until the new one is whole
GIB = 2**30
CUDA_CONTEXT = 640 * 2**20  # that the driver takes of a GPU for each process, and torch does not count
# what the program takes between this check and its first microbatch: text, compiled loops, threads
STARTING = 112 * 2**20
VARYING = 16 * 2**20  # from one start of the program to the next
# torch's ways to say that an allocation failed; a limit set by ulimit is met so. The libraries below it have words of
# their own, and on a full GPU come first: what they cannot begin with mostly lacks memory for its workspace
NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "out of memory",
    "BLAS_STATUS_ALLOC_FAILED", "BLAS_STATUS_NOT_INITIALIZED", "SOLVER_STATUS_ALLOC_FAILED",
    "DNN_STATUS_ALLOC_FAILED", "DNN_STATUS_NOT_INITIALIZED", "HOST_ALLOCATION_FAILED", "DEVICE_ALLOCATION_FAILED",
)  # fmt: skip
# What a driver says after which no call of this process succeeds any more: of CUDA's errors the sticky ones
DEAD_DEVICE = (
    "launch failure", "device-side assert", "illegal memory access", "illegal address", "illegal instruction",
    "misaligned address", "invalid program counter", "hardware stack error", "launch timed out", "launch timeout",
    "uncorrectable", "unspecified driver error", "unknown error", "gpu is lost", "fallen off the bus", "xid",
    "contained error", "no longer available",
)  # fmt: skip
DRIVERS = ("CUDA error", "CUDA driver error", "HIP error", "cudaError", "NVML", "CUBLAS_", "CUDNN_")


def memory_needed(manifest: Manifest, stage: int) -> int:
    """Bytes with which the stage runs at its fastest, on a device that is the host: by formula."""
    whole = estimated(manifest, stage, manifest.inner.sequences, recomputes=False)
    activations = whole.of(least_in_flight(manifest, stage))
    return memory_of_state(manifest, stage) + memory_of_buffers(manifest, stage).total + activations


def least_memory(manifest: Manifest, stage: int, recompute: str = "auto", on_host: bool = True) -> int:
    """Bytes of the device without which the stage does not run at all; see `execution` for how it gets by."""
    buffers = memory_of_buffers(manifest, stage).total if on_host else 0
    return memory_of_state(manifest, stage) + buffers + least_activations(manifest, stage, recompute)


def memory_of(device: torch.device, processes: int = 1) -> int:
    """Bytes that the device has for the tensors of so many processes together."""
    if device.type == "mps":
        return most_for_metal()
    if device.type != "cuda":
        return psutil.virtual_memory().total
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total - processes * CUDA_CONTEXT


def room_on(device: torch.device, most: int = 0) -> Room:
    """The free memory of the device, the host's for a processor; `most` bytes are all that the volunteer gives."""
    if device.type == "mps":
        return _room_of_metal(most)
    if device.type != "cuda":
        return host_room(most)
    free, total = torch.cuda.mem_get_info(device)
    rooms = [Room(free, total)]
    if most:
        rooms.append(Room(most - torch.cuda.memory_reserved(device), most, "--max-memory"))
    return min(rooms, key=lambda room: room.free)


def _room_of_metal(most: int) -> Room:
    """The free memory of an Apple GPU, which is the host's: `most` bytes are for Metal and the process together."""
    limit, by_metal = most_for_metal(), taken_by_metal()
    rooms = [host_room(), Room(limit - by_metal, limit)]
    if most:
        rooms.append(Room(most - taken() - by_metal, most, "--max-memory"))
    return min(rooms, key=lambda room: room.free)


def require_memory(
    manifest: Manifest, stage: int, room: Room, recompute: str = "auto", on_host: bool = True
) -> None:
    """Check that the stage fits into the memory that is free now. Raises `ResourceError` when it does not."""
    starting = STARTING if on_host else 0
    needed = least_memory(manifest, stage, recompute, on_host) + starting
    if needed > room.free:
        raise too_little(manifest, stage, needed, room, recompute, on_host, starting)


def too_little(
    manifest: Manifest,
    stage: int,
    needed: int,
    room: Room,
    recompute: str = "auto",
    on_host: bool = True,
    starting: int = 0,
) -> ResourceError:
    """The refusal: `needed` bytes more than are taken now would do, `starting` of them for the program."""
    told = (
        f"Stage {stage} of run '{manifest.name}' needs {size(needed)} of memory, but "
        f"{size(max(0, room.free))} are free{room.described()}. "
    )
    if room.source:
        told += f"A limit of {_rounded_up(room.limit - room.free + needed + VARYING)} would do. "
    if manifest.stages > 1:
        stages = range(manifest.stages)
        least = [least_memory(manifest, other, recompute, on_host) + starting for other in stages]
        smallest = least.index(min(least))
        fits = "fits" if least[smallest] <= room.free and smallest != stage else "is the smallest"
        told += f"Stage {smallest} {fits}, with {size(least[smallest])}. "
    return ResourceError(
        f"{told}{_room_made(room)}, use a larger machine, or ask the run's owner for more, smaller stages."
    )


def _room_made(room: Room) -> str:
    """The start of a sentence on making room: of a limit of its own, other programs take nothing."""
    return "Raise that limit" if room.source else "Close other programs"


def _rounded_up(count: int) -> str:
    unit = GIB // 10 if count >= GIB else 2**20
    return size(-(-count // unit) * unit)


def require_host_memory(manifest: Manifest, stage: int, room: Room) -> None:
    """Check the host's memory for rounds, checkpoints and messages beside a device's own. Raises `ResourceError`."""
    buffers = memory_of_buffers(manifest, stage)
    needed = buffers.total + buffers.checkpoint  # of which one is written or given away, and one copied
    if needed > room.free:
        raise ResourceError(
            f"Stage {stage} of run '{manifest.name}' needs {size(needed)} of the machine's memory beside the "
            f"device's, for averaging, checkpoints and messages, but {size(max(0, room.free))} are "
            f"free{room.described()}. {_room_made(room)}, or use a machine with more."
        )


def stages_that_fit(
    manifest: Manifest, room: Room, recompute: str = "auto", on_host: bool = True
) -> list[int]:
    """The stages that a machine with so much memory could hold."""
    left = room.free - (STARTING if on_host else 0)
    return [s for s in range(manifest.stages) if least_memory(manifest, s, recompute, on_host) <= left]


def require_disk(
    manifest: Manifest,
    stage: int,
    directory: Path,
    free: int | None = None,
    here: int = 0,
    beside: int = 0,
) -> None:
    """Check that checkpoints of the stage fit on the disk. Raises `ResourceError` when they do not.

    `here`: bytes of the stage's last checkpoint, which is on the disk already and is replaced. `beside`: bytes that
    checkpoints of other stages are still to take there.
    """
    whole = nbytes_of_checkpoint(manifest, stage)
    needed = max(whole, CHECKPOINTS * whole - here)
    free = shutil.disk_usage(directory).free if free is None else free
    if needed + beside > free:
        others = f", beside {size(beside)} for those of other stages" if beside else ""
        raise ResourceError(
            f"Checkpoints of stage {stage} need {size(needed)} in {directory}{others}, but "
            f"{size(free)} are free. Free some space or choose another disk with --state-dir."
        )


def nbytes_of_checkpoint(manifest: Manifest, stage: int) -> int:
    """Bytes on disk of one checkpoint of the stage."""
    return parameter_count(manifest, stage) * 4 * TENSORS_OF_CHECKPOINT


# --- memory that runs out in spite of it ---------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def has_lost_device(error: BaseException) -> bool:
    """Return whether the error says that the device has failed for good: Xid, ECC, or a kernel that broke it."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    words = str(error)
    return any(driver in words for driver in DRIVERS) and any(dead in words.lower() for dead in DEAD_DEVICE)


def named(error: BaseException) -> BaseException:
    """The error that callers expect, however it was said: itself, `OutOfMemory`, or `DeviceFailed`."""
    if has_lost_device(error):
        return _failed(error)
    if not is_out_of_memory(error):
        return error
    try:
        free_caches()
    except RuntimeError as worse:  # a device that has failed may say at first that it has no memory
        return _failed(worse) if has_lost_device(worse) else worse
    return OutOfMemory(_first_line(error))


def _failed(error: BaseException) -> DeviceFailed:
    reason = legible(_first_line(error))[:200]
    return DeviceFailed(
        f"The device that computes has failed ({reason}). What it held is lost: this node ends. Start it again to go "
        "on from its last checkpoint; if it fails again, look at the system's log (dmesg), and at the device's "
        "temperature and memory (nvidia-smi -q)."
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def free_caches() -> None:
    """Give back what is kept for later allocations, here and on a GPU."""
    give_back_freed_memory()
    give_back_cached()


def retried(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, once more with caches emptied when memory runs out: failing so, it must change nothing."""
    try:
        return work(*args, **kwargs)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    free_caches()
    return work(*args, **kwargs)
