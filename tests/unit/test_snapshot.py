"""A copy of a replica's state that is made while it trains is of one instant, and holds nobody up."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node.model.compute import ComputeThread, Priority
from node.model.flat import StageState
from node.model.replica import Replica
from node.model.snapshot import ORDER, HostCopier, Room, Snapshots
from node.state.checkpoints import SHARE_OF_PASS
from node.watch.trace import TraceFile
from tests.swarm.micro import micro_batch, micro_manifest
from tests.unit.replicas import manifest_cut, replicas_of, train_step
from tests.unit.test_replica_state import assert_same_state

MOST_DELAY = 0.05  # of a microbatch's time


class SmallParts(HostCopier):
    entries = 100


class LateParts(HostCopier):
    """A device that copies as late as it may: when it must be there, or may be changed."""

    entries = 100
    rooms = 2

    def __init__(self) -> None:
        self.launched: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launched.append((target, source))

    def finish(self) -> None:
        for target, source in self.launched:
            target.copy_(source)
        self.launched.clear()

    def before_change(self) -> None:
        self.finish()


def one_part_at_a_time() -> Callable[[], float]:
    """A clock by which each part takes all the time that there is."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def training(copier: HostCopier) -> Replica:
    """A replica of one stage, with a step behind it, that owes something to partners."""
    [replica] = replicas_of(manifest_cut(1))
    replica.snapshots = Snapshots(replica.state, copier)
    train_step([replica], 0)
    replica.residual.keep(replica.phi, torch.zeros_like(replica.phi), slice(None))
    return replica


def begin(replica: Replica) -> StageState:
    """Begin a snapshot; returns what it should be."""
    replica.snapshots.begin(replica.snapshots.room())
    return replica.snapshot()


@pytest.mark.parametrize("parts_between", [0, 3, 40, 1000])
@pytest.mark.parametrize("copier", [HostCopier, SmallParts, LateParts])
def test_steps_and_rounds_go_on_and_the_copy_is_of_the_instant(
    copier: type[HostCopier], parts_between: int
) -> None:
    replica, clock = training(copier()), one_part_at_a_time()
    expected = begin(replica)
    for seed in range(1, 5):
        for _ in range(parts_between):
            replica.snapshots.advance(0.5, clock)
        train_step([replica], seed)
        if seed == 2:
            replica.snapshots.before_change("residual")
            replica.residual.keep(replica.phi, replica.delta, slice(None))
            replica.finish_round_alone()
    assert replica.snapshots.advance(math.inf, clock)
    assert_same_state(replica.snapshots.landed(), expected)
    assert (replica.step, replica.round) == (5, 1)


def test_an_inner_step_waits_for_what_it_changes_alone() -> None:
    replica = training(SmallParts())
    begin(replica)
    room = replica.snapshots._room
    for tensor in room.values():
        tensor.fill_(math.nan)
    train_step([replica], 1)
    there = [name for name in ORDER if not room[name].isnan().any()]
    assert there == ["theta", "first_moment", "second_moment"]


def test_weights_that_are_replaced_are_copied_first() -> None:
    replica, other = training(LateParts()), training(HostCopier())
    train_step([other], 7)
    expected = begin(replica)
    replica.restore(other.snapshot())
    replica.snapshots.advance(math.inf, one_part_at_a_time())
    assert_same_state(replica.snapshots.landed(), expected)


@pytest.mark.parametrize(("copier", "rooms"), [(HostCopier, 1), (LateParts, 2)])
def test_memory_is_kept_and_used_again(copier: type[HostCopier], rooms: int) -> None:
    replica, places = training(copier()), []
    for seed in range(6):
        expected = begin(replica)
        replica.snapshots.advance(math.inf, one_part_at_a_time())
        train_step([replica], seed)
        state = replica.snapshots.landed()
        assert_same_state(state, expected)
        places.append(state.phi.data_ptr())
        replica.snapshots.keep(state)
    assert len(set(places)) == rooms


def test_a_copy_that_is_given_up_leaves_the_next_one_whole() -> None:
    replica = training(LateParts())
    begin(replica)
    replica.snapshots.advance(0.5, one_part_at_a_time())
    replica.snapshots.give_up()
    train_step([replica], 1)
    expected = begin(replica)
    replica.snapshots.advance(math.inf, one_part_at_a_time())
    assert_same_state(replica.snapshots.landed(), expected)


def test_donors_read_the_last_one_while_the_slow_weights_are_the_same() -> None:
    replica = training(HostCopier())
    assert replica.read_saved_piece(0) is None
    begin(replica)
    replica.snapshots.advance(math.inf, one_part_at_a_time())
    replica.snapshots.keep(replica.snapshots.landed())
    told = replica.read_piece(0, moments=True)
    train_step([replica], 1)
    saved = replica.read_saved_piece(0)
    assert saved is not None
    state, tensors = saved
    assert (state.step, state.round) == (1, 0)
    assert all(torch.equal(one, other) for one, other in zip(tensors, told, strict=True))
    assert torch.equal(tensors[0], replica.phi[: len(tensors[0])])
    replica.finish_round_alone()
    assert replica.read_saved_piece(0) is None


def test_donors_do_not_read_what_was_replaced() -> None:
    replica, other = training(HostCopier()), training(HostCopier())
    begin(replica)
    replica.snapshots.advance(math.inf, one_part_at_a_time())
    replica.snapshots.keep(replica.snapshots.landed())
    replica.restore(other.snapshot())
    assert replica.round == other.round
    assert replica.read_saved_piece(0) is None


# --- beside training ----------------------------------------------------------------------------


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
        return replica.snapshot()

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


@pytest.mark.long
def test_a_snapshot_under_way_delays_no_microbatch_by_more_than_a_twentieth(tmp_path: Path) -> None:
    """By the compute thread's time of the processor, which other programs do not change."""
    trace = TraceFile(tmp_path / "trace.json", time.thread_time)
    made, expected, parts = asyncio.run(snapshot_beside_microbatches(trace))
    trace.close()
    assert_same_state(made, expected)
    found = delays(tmp_path / "trace.json")
    assert sum(delay > 0 for delay in found) == parts > 4
    assert max(found) <= MOST_DELAY
