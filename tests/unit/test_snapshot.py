"""A copy of a replica's state that is made while it trains is of one instant, and holds nobody up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from node.model.replica import Replica
from node.model.snapshot import ORDER, HostCopier, Snapshots
from node.storage.stage_state import StageState
from tests.copied_state import copied_state
from tests.unit.replicas import manifest_cut, replicas_of, train_step
from tests.unit.test_replica_state import assert_same_state


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
    """A replica of one stage, with a step behind it."""
    [replica] = replicas_of(manifest_cut(1))
    replica.snapshots = Snapshots(replica.state, copier)
    train_step([replica], 0)
    return replica


def begin(replica: Replica) -> StageState:
    """Begin a snapshot; returns what it should be."""
    replica.snapshots.begin(replica.snapshots.room())
    return copied_state(replica)


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
            replica.finish_round_alone(replica.whole)
    assert replica.snapshots.advance(math.inf, clock)
    assert_same_state(replica.snapshots.landed(), expected)
    assert (replica.step, replica.round) == (5, 1)


def test_an_inner_step_waits_for_what_it_changes_alone() -> None:
    replica = training(SmallParts())
    room = replica.snapshots.room()
    replica.snapshots.begin(room)
    for tensor in room.values():
        tensor.fill_(math.nan)
    train_step([replica], 1)
    there = [name for name in ORDER if not room[name].isnan().any()]
    assert there == ["theta", "first_moment", "second_moment"]


def test_weights_that_are_replaced_are_copied_first() -> None:
    replica, other = training(LateParts()), training(HostCopier())
    train_step([other], 7)
    expected = begin(replica)
    replica.restore(copied_state(other))
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
    replica.finish_round_alone(replica.whole)
    assert replica.read_saved_piece(0) is None


def test_donors_do_not_read_what_was_replaced() -> None:
    replica, other = training(HostCopier()), training(HostCopier())
    begin(replica)
    replica.snapshots.advance(math.inf, one_part_at_a_time())
    replica.snapshots.keep(replica.snapshots.landed())
    replica.restore(copied_state(other))
    assert replica.round == other.round
    assert replica.read_saved_piece(0) is None


# --- beside training ----------------------------------------------------------------------------
