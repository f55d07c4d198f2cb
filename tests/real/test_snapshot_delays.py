"""What a snapshot under way costs the microbatches beside it, in the compute thread's own time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from node.model.compute import ComputeThread, Priority
from node.model.replica import Replica
from node.model.snapshot import Room
from node.state.checkpoints import SHARE_OF_PASS
from node.storage.stage_state import StageState
from node.watch.trace import TraceFile
from tests.copied_state import copied_state
from tests.swarm.micro import micro_batch, micro_manifest
from tests.unit.test_replica_state import assert_same_state

MOST_DELAY = 0.05  # of a microbatch's time


def delays(trace: Path) -> list[float]:
    """Of each microbatch, of its own time: what parts of a snapshot took since the one before it."""
    spans = json.loads(trace.read_text())
    jobs = sorted((e for e in spans if e.get("ph") == "X" and "priority" in e["args"]), key=lambda e: e["ts"])
    found, parts = [], 0.0
    for job in jobs:
        if job["args"]["priority"] == "snapshot":
            parts += job["dur"]
        elif job["args"]["priority"] == "forward":
            found.append(parts / job["dur"])
            parts = 0.0
    return found


async def snapshot_beside_microbatches(trace: TraceFile) -> tuple[StageState, StageState, int]:
    """Microbatches that wait in a row, and a snapshot, as `Checkpoints` asks for it."""
    manifest = micro_manifest(
        stages=1, model__hidden_size=512, model__intermediate_size=1024, inner__sequences=2
    )
    replica, compute = Replica(manifest, 0), ComputeThread(1, trace)
    compute.clock = time.thread_time
    snapshots, tokens = replica.snapshots, manifest.data.sequence_tokens

    def microbatch(seed: int) -> None:
        replica.passes.last_stage(*micro_batch(seed, 2, tokens))

    def microbatches(first: int, last: int) -> asyncio.Future[list[None]]:
        return asyncio.gather(*(compute.run(Priority.FORWARD, microbatch, n) for n in range(first, last)))

    def begin(room: Room) -> StageState:
        snapshots.begin(room)
        return copied_state(replica)

    await microbatches(0, 8)
    room, training = snapshots.room(), microbatches(8, 40)
    expected = await compute.run(Priority.OPTIMIZER, begin, room)
    is_copied, parts = False, 0
    while not is_copied:
        seconds = SHARE_OF_PASS * compute.pass_seconds()
        is_copied = await compute.run(Priority.SNAPSHOT, snapshots.advance, seconds, compute.clock)
        parts += 1
        if parts == 4:
            await compute.run(Priority.OPTIMIZER, replica.inner_step, 8)
    await training
    await compute.close()
    return snapshots.landed(), expected, parts


def test_a_snapshot_under_way_delays_no_microbatch_by_more_than_a_twentieth(tmp_path: Path) -> None:
    """By the compute thread's time of the processor, which other programs do not change."""
    trace = TraceFile(tmp_path / "trace.json", time.thread_time)
    made, expected, parts = asyncio.run(snapshot_beside_microbatches(trace))
    trace.close()
    assert_same_state(made, expected)
    found = delays(tmp_path / "trace.json")
    assert sum(delay > 0 for delay in found) == parts > 4
    assert max(found) <= MOST_DELAY
