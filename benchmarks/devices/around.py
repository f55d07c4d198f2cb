"""What happens around microbatches on a device: outer step, snapshot and round, against what memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from pipelines.chain import Chain

from node.machine.accelerator import synchronize
from node.model.replica import Replica
from protocol.run.manifest import Manifest

MATRIX = {"cuda": 8192, "cpu": 512}
COPIED = {"cuda": 2**28, "cpu": 2**24}  # float32
PASSES_OF_OUTER_STEP = 6  # alone: θ, φ and δ are read and written once each
REPEATS, ROUNDS = 5, 3


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The fastest of some, after one that warms up."""
    taken = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def arithmetic_of(device: torch.device) -> float:
    """Operations a second of a large matrix product, in bf16 on a GPU."""
    size, dtype = MATRIX[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds_of(lambda: matrix @ matrix, device)


def bandwidth_of(device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds_of(lambda: target.copy_(source), device)


def around(manifest: Manifest, device: torch.device) -> dict[str, Any]:
    """Of the manifest's only stage: milliseconds of an outer step alone, of its bytes, and of a snapshot."""
    replica = Replica(manifest, 0, str(device))
    bytes_ = PASSES_OF_OUTER_STEP * 4 * replica.parameters
    stepping = seconds_of(lambda: replica.finish_round_alone(replica.whole), device)
    return {
        "parameters": replica.parameters,
        "outer_step_ms": 1e3 * stepping,
        "its_bytes_ms": 1e3 * bytes_ / bandwidth_of(device),
        "snapshot_GB": sum(tensor.nbytes for tensor in replica.state().tensors().values()) / 1e9,
        "snapshot_stall_ms": 1e3 * stall_of(replica),
    }


def stall_of(replica: Replica) -> float:
    """Seconds of the device for a snapshot, at worst: all is to change as soon as it has begun.

    Work launched from then on waits there for the copy, while the compute thread goes on launching.
    """
    snapshots, room = replica.snapshots, replica.snapshots.room()
    synchronize(replica.device)
    began = time.perf_counter()
    snapshots.begin(room)
    snapshots.before_change()
    synchronize(replica.device)
    stalled = time.perf_counter() - began
    snapshots.landed()
    return stalled


class Pair(Chain):
    """Two nodes of one stage, which average with each other."""

    def stages(self) -> list[int]:
        return [0, 0]


def blocked_by_a_round(manifest: Manifest, device: str) -> float:
    """Seconds in which a node stood still for a round with its partner; the shortest of those that averaged."""
    with Pair(manifest, [("127.0.0.1", [])] * 3, device=device) as pair:
        return float(min(pair.wait_for(lambda: _blocked(pair))))


def _blocked(pair: Pair) -> list[float]:
    """None yet where too few have averaged."""
    rounds = [event for event in pair.events("round") if event["partner"]]
    return [float(event["blocked_seconds"]) for event in rounds] if len(rounds) >= ROUNDS else []
