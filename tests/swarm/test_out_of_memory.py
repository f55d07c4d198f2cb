"""Memory that runs out, in any work of a node: nobody ends, and training goes on with whole batches."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import node.model.replica
import node.rounds.gossip
from bootstrap.lab.simulation.swarm import SimulatedSwarm
from node.model.inner import norm_of
from node.model.replica import Replica
from node.rounds.contribution import TensorPool
from node.rounds.pull import Pull
from protocol.errors import StateError
from tests.swarm.micro import (
    FOREVER,
    all_reached,
    assert_exact_admission,
    events_of,
    everyone_goes_on,
    everyone_reaches,
    micro_swarm,
    run_swarm,
    until,
)


def runs_out(owner: Any, method: str, fails: Callable[[], bool], late: bool = False) -> None:
    """`method` fails as torch does whenever `fails()`; with `late` after it has done its work."""
    original = getattr(owner, method)

    def failing(*args: Any, **kwargs: Any) -> Any:
        does_fail = fails()
        result = original(*args, **kwargs) if late or not does_fail else None
        if does_fail:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    setattr(owner, method, failing)


def at_calls(*numbers: int) -> Callable[[], bool]:
    calls = iter(range(10**6))
    return lambda: next(calls) in numbers


def made_short(shorten: Callable[[Replica], None]) -> Callable[[Any, int, str], Replica]:
    def make(manifest: Any, stage: int, device: str) -> Replica:
        replica = Replica(manifest, stage, device)
        shorten(replica)
        return replica

    return make


async def swarm_with(
    stage: int, shorten: Callable[[Replica], None], directory: Path | None = None, **changes: Any
) -> SimulatedSwarm:
    """Two stages of two replicas; node 0 or 1 runs out of memory."""
    swarm: SimulatedSwarm = micro_swarm(directory=directory, inner__total_steps=FOREVER, **changes)
    await swarm.seed_peer.start()
    for number in range(4):
        is_short = number == stage
        swarm.add(number, stage=number % 2, replica=made_short(shorten) if is_short else Replica)
    await everyone_reaches(swarm, 8)
    await everyone_goes_on(swarm, 4)
    return swarm


async def assert_all_train(swarm: SimulatedSwarm) -> None:
    assert not any(task.done() for task in swarm.tasks.values())
    assert_exact_admission(swarm)
    await swarm.leave()


# --- passes -------------------------------------------------------------------------------------


def forward_of_many(replica: Replica) -> None:
    """A second graph does not fit beside the first."""
    graphs: list[weakref.ref[torch.Tensor]] = []
    original = replica.passes.forward

    def forward(inputs: torch.Tensor) -> Any:
        alive = [graph for graph in graphs if graph() is not None]
        if alive:
            raise torch.OutOfMemoryError("CUDA out of memory")
        leaf, outputs = original(inputs)
        graphs.append(weakref.ref(outputs))
        return leaf, outputs

    replica.passes.forward = forward  # type: ignore[method-assign]


@pytest.mark.long
def test_graphs_that_do_not_fit_beside_each_other_are_fewer_from_then_on() -> None:
    async def main() -> None:
        swarm = await swarm_with(0, forward_of_many, inner__microbatches=3)
        [told] = events_of(swarm, "made-smaller")
        assert (told["node"], told["in_flight"], told["at_once"]) == (0, 1, 0)
        assert not [event for event in events_of(swarm, "step") if event["left_out"]]
        await assert_all_train(swarm)

    run_swarm(main())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_pass_that_does_not_fit_is_made_in_slices(stage: int) -> None:
    def shorten(replica: Replica) -> None:
        method = "forward" if stage == 0 else "last_stage"
        whole = replica.manifest.inner.sequences
        calls = iter(range(10**6))
        runs_out(
            replica.passes,
            method,
            lambda: next(calls) > 10 and replica.passes.execution.at_once in (0, whole),
        )

    async def main() -> None:
        swarm = await swarm_with(stage, shorten)
        told = events_of(swarm, "made-smaller")
        assert 0 < told[-1]["at_once"] < swarm.manifest.inner.sequences
        assert len(told) <= 2  # once for the microbatches in flight, once for slices
        assert {event["node"] for event in told} == {stage}
        assert not [event for event in events_of(swarm, "step") if event["left_out"]]
        await assert_all_train(swarm)

    run_swarm(main())


def test_the_head_of_a_ring_that_does_not_fit_is_computed_in_slices() -> None:
    def shorten(replica: Replica) -> None:
        whole, calls = replica.manifest.inner.sequences, iter(range(10**6))
        runs_out(
            replica.passes,
            "head",
            lambda: next(calls) > 10 and replica.passes.execution.at_once in (0, whole),
        )

    async def main() -> None:
        swarm = await swarm_with(0, shorten, model__tied_embeddings=True)
        [told] = events_of(swarm, "made-smaller")
        assert told["node"] == 0
        assert 0 < told["at_once"] < swarm.manifest.inner.sequences
        assert not [event for event in events_of(swarm, "step") if event["left_out"]]
        await assert_all_train(swarm)

    run_swarm(main())


def test_ever_less_memory_takes_what_is_in_flight_then_slices_then_recomputation_each_told_once() -> None:
    """Room for three graphs, soon for two, then for half of a microbatch, then for a quarter."""

    def shorten(replica: Replica) -> None:
        graphs: list[weakref.ref[torch.Tensor]] = []
        calls, original = itertools.count(), replica.passes.forward

        def forward(inputs: torch.Tensor) -> Any:
            call, way = next(calls), replica.passes.execution
            held = sum(graph() is not None for graph in graphs)
            pass_ = 1.0 if not way.at_once else way.at_once / len(inputs) / (1 + way.recomputes)
            if held + pass_ > (3 if call < 6 else 2 if call < 16 else 0.5 if call < 30 else 0.25):
                raise torch.OutOfMemoryError("CUDA out of memory")
            leaf, outputs = original(inputs)
            if outputs.requires_grad:
                graphs.append(weakref.ref(outputs))
            return leaf, outputs

        replica.passes.forward = forward  # type: ignore[method-assign]

    async def main() -> None:
        swarm = await swarm_with(0, shorten, inner__microbatches=3)
        await everyone_goes_on(swarm, 8)
        told = [
            (-event["in_flight"], -(event["at_once"] or 2), event["recomputes"])
            for event in events_of(swarm, "made-smaller")
        ]
        assert told == sorted(set(told))  # nothing is given back, nothing told twice
        assert told[0] == (-2, -2, False)
        assert told[-1][1:] == (-1, True)
        assert [way[1:] for way in told if way[1:] != (-2, False)] == [(-1, False), (-1, True)]
        await assert_all_train(swarm)

    run_swarm(main())


def short_of_gradients(fails: Callable[[int], bool]) -> Callable[[Replica], None]:
    """The gradient that is made last finds no memory when `fails` says so of its number."""

    def shorten(replica: Replica) -> None:
        calls = itertools.count()

        def fail(_: torch.Tensor) -> None:
            if fails(next(calls)):
                raise torch.OutOfMemoryError("CUDA out of memory")

        next(replica.stage.parameters()).register_hook(fail)

    return shorten


@pytest.mark.parametrize("stage", [0, 1])
def test_a_backward_pass_that_ends_halfway_is_brought_to_its_end(stage: int) -> None:
    async def main() -> None:
        swarm = await swarm_with(stage, short_of_gradients(lambda call: call == 9))
        assert not events_of(swarm, "step-left-out")
        assert not [event for event in events_of(swarm, "step") if event["left_out"]]
        # the last stage has it all to do again, which may be enough
        assert len(events_of(swarm, "made-smaller", node=stage)) == (1 if stage == 0 else 0)
        short = swarm.nodes[stage].replica
        assert short.optimizer.updates == short.step
        await assert_all_train(swarm)

    run_swarm(main())


@pytest.mark.parametrize("stage", [0, 1])
def test_one_that_comes_to_no_end_costs_its_batch_as_a_whole(stage: int) -> None:
    """Part of a microbatch is in the gradients then: nothing is learned from them."""

    async def main() -> None:
        swarm = await swarm_with(stage, short_of_gradients(lambda call: 9 <= call < 15))
        left_out = events_of(swarm, "step-left-out")
        assert {event["reason"] for event in left_out} == {"memory"}
        short = swarm.nodes[stage].replica
        assert short.optimizer.updates == short.step - len(left_out)
        await assert_all_train(swarm)

    run_swarm(main())


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_a_microbatch_that_never_fits_is_refused_and_told_once_and_the_node_stays(stage: int) -> None:
    def shorten(replica: Replica) -> None:
        runs_out(replica.passes, "forward" if stage == 0 else "last_stage", lambda: True)

    async def main() -> None:
        swarm: SimulatedSwarm = micro_swarm(inner__total_steps=FOREVER)
        await swarm.seed_peer.start()
        for number in range(4):
            replica: Any = made_short(shorten) if number == stage else Replica
            swarm.add(number, stage=number % 2, replica=replica)
        others = [node for number, node in swarm.nodes.items() if number != stage]
        await until(lambda: all_reached(others, 8))
        assert len(events_of(swarm, "out-of-memory", node=stage)) == 1
        assert [task.result() for task in swarm.tasks.values() if task.done()] == []  # or what ended it
        await swarm.leave()

    run_swarm(main())


# --- the rest -----------------------------------------------------------------------------------


def test_an_optimizer_that_runs_out_twice_leaves_one_step_out() -> None:
    def shorten(replica: Replica) -> None:
        runs_out(replica.optimizer, "_step", at_calls(4, 10, 11))  # the first is tried again

    async def main() -> None:
        swarm = await swarm_with(1, shorten)
        assert [event["reason"] for event in events_of(swarm, "step-left-out")] == ["memory"]
        assert swarm.nodes[1].replica.optimizer.updates == swarm.nodes[1].replica.step - 1
        await assert_all_train(swarm)

    run_swarm(main())


def test_gradients_whose_norm_cannot_be_computed_leave_one_step_out() -> None:
    original, calls = norm_of, iter(range(10**6))

    def fails(gradients: torch.Tensor) -> float:
        if next(calls) in (10, 11):  # the first is tried again
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(gradients)

    async def main() -> None:
        swarm = await swarm_with(1, lambda _: None)
        assert [event["reason"] for event in events_of(swarm, "step-left-out")] == ["memory"]
        await assert_all_train(swarm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node.model.replica, "norm_of", fails)
        run_swarm(main())


def test_an_outer_step_that_runs_out_counts_the_own_progress_alone() -> None:
    calls = at_calls(0)

    class Short(Pull):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if calls():
                raise torch.OutOfMemoryError("CUDA out of memory")

    async def main() -> None:
        swarm = await swarm_with(1, lambda _: None)
        [told] = events_of(swarm, "round-alone")
        rounds = events_of(swarm, "round", node=told["node"])
        assert rounds[0]["partner"] is None
        assert [event["round"] for event in rounds] == list(range(1, len(rounds) + 1))  # none is taken twice
        assert any(event["partner"] for event in rounds[1:])
        await assert_all_train(swarm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node.rounds.gossip, "Pull", Short)
        run_swarm(main())


def test_a_partners_contribution_that_there_is_no_memory_for_is_refused_as_such() -> None:
    calls = at_calls(0)

    def take(pool: TensorPool, parameters: int) -> torch.Tensor:
        if calls():
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
            )
        return torch.empty(parameters)

    async def main() -> None:
        swarm = await swarm_with(1, lambda _: None)
        assert any(event["partner"] for event in events_of(swarm, "round"))
        await assert_all_train(swarm)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorPool, "take", take)
        run_swarm(main())  # which fails when anything was logged as an error


@pytest.mark.long
def test_an_exchange_that_runs_out_ends_its_round_alone() -> None:
    for overlap in ("none", "phi-early"):

        def shorten(replica: Replica) -> None:
            runs_out(replica.whole, "offered_phi", at_calls(0, 1, 2))

        async def main(overlap: str = overlap) -> None:
            swarm = await swarm_with(1, shorten, outer__overlap=overlap)
            assert events_of(swarm, "round", node=1)
            await assert_all_train(swarm)

        run_swarm(main())


@pytest.mark.parametrize("step", ["room", "begin", "advance", "landed"])
def test_a_checkpoint_without_memory_is_skipped_with_a_sentence(tmp_path: Path, step: str) -> None:
    def shorten(replica: Replica) -> None:
        runs_out(replica.snapshots, step, at_calls(0))

    async def main() -> None:
        swarm = await swarm_with(1, shorten, tmp_path)
        checkpoints = swarm.nodes[1].checkpoints
        with pytest.raises(StateError, match="--max-memory"):
            await checkpoints.save()
        await checkpoints.save()
        [saved] = events_of(swarm, "checkpoint", node=1)
        assert saved["step"] > 0
        await assert_all_train(swarm)

    run_swarm(main())


def test_a_state_piece_without_memory_is_refused_and_taken_from_another() -> None:
    def shorten(replica: Replica) -> None:
        runs_out(replica, "read_piece", lambda: True)

    async def main() -> None:
        swarm = await swarm_with(1, shorten)
        newcomer = swarm.add(4, stage=1)
        await everyone_reaches(swarm, 1)
        assert newcomer.replica.round > 0
        await assert_all_train(swarm)

    run_swarm(main())
