"""A backward pass that ends halfway goes on where it ended: each gradient gets each sequence once."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.model.execution import Execution
from node.model.replica import Replica
from protocol.errors import NonFinite, OddLoss
from tests.unit.replicas import manifest_cut

SEQUENCES, TOKENS = 4, 16


class Short(torch.OutOfMemoryError):
    """What a test throws, and torch has not."""


def replica_of(stage: int, stages: int, tied: bool, execution: Execution) -> Replica:
    shape = {"inner__sequences": SEQUENCES, "data__sequence_tokens": TOKENS, "model__tied_embeddings": tied}
    replica = Replica(manifest_cut(stages, **shape), stage)
    replica.passes.execute(execution)
    return replica


def microbatch(replica: Replica) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels, and a gradient by the outputs."""
    model, rng = replica.manifest.model, torch.Generator().manual_seed(7)
    tokens = torch.randint(model.vocab_size, (SEQUENCES, TOKENS), generator=rng)
    hidden = torch.randn((SEQUENCES, TOKENS, model.hidden_size), generator=rng)
    return (tokens if replica.stage.is_first else hidden), tokens, hidden


def taught(replica: Replica, tries: int) -> torch.Tensor | None:
    """One microbatch forward and backward, `tries` times where it fails, in ever smaller slices."""
    passes = replica.passes
    inputs, labels, by_outputs = microbatch(replica)
    ends = replica.stage.is_last and not replica.stage.is_ring
    leaf, outputs = (inputs, inputs) if ends else passes.forward(inputs)
    for attempt in range(tries):
        try:
            if ends:
                return passes.last_stage(inputs, labels)[1]
            work = passes.backward_again if attempt else lambda leaf, by: passes.backward(leaf, outputs, by)
            return work(leaf, by_outputs)
        except Short:
            passes.execute(replace(passes.execution, at_once=(2, 1, 1)[min(attempt, 2)]))
    raise AssertionError("it never came to its end")


def fail_at(replica: Replica, calls: frozenset[int]) -> None:
    """The gradients with these numbers, in the order in which they are made, find no memory."""
    made = itertools.count()

    def hook(_: torch.Tensor) -> None:
        if next(made) in calls:
            raise Short("CUDA out of memory")

    for parameter in replica.stage.parameters():
        parameter.register_hook(hook)


WAYS = {
    "whole": Execution(),
    "slices": Execution(at_once=2),
    "recomputed": Execution(recomputes=True),
    "bf16": Execution(precision="bf16"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stage", "stages", "tied"), [(0, 2, False), (1, 2, False), (0, 1, False), (0, 2, True), (1, 2, True)]
)
def test_wherever_it_ends_the_gradients_are_those_of_an_undisturbed_pass(
    stage: int, stages: int, tied: bool, way: str
) -> None:
    expected = replica_of(stage, stages, tied, WAYS[way])
    by_inputs = taught(expected, 1)
    many = len(list(expected.stage.parameters()))
    for calls in [{n} for n in range(0, many, 4)] + [{0, many + 1}, {2, 3, 4}, {many - 1, many, many + 2}]:
        replica = replica_of(stage, stages, tied, WAYS[way])
        fail_at(replica, frozenset(calls))
        found = taught(replica, 4)
        assert not replica.passes.is_spoiled
        tolerance = 2e-2 if way == "bf16" else 1e-5
        torch.testing.assert_close(
            replica.flat.gradients, expected.flat.gradients, rtol=tolerance, atol=tolerance * 0.1
        )
        if by_inputs is None:
            assert found is None
        else:
            assert found is not None
            torch.testing.assert_close(found, by_inputs, rtol=tolerance, atol=tolerance * 0.1)


def test_a_pass_that_is_given_up_halfway_spoils_the_batch_until_it_is_forgotten() -> None:
    replica = replica_of(1, 2, False, Execution())
    inputs, labels, _ = microbatch(replica)
    fail_at(replica, frozenset({3}))
    with pytest.raises(Short):
        replica.passes.last_stage(inputs, labels)
    assert replica.passes.is_spoiled
    replica.passes.last_stage(inputs.clone(), labels)  # another one comes to its end
    assert replica.passes.is_spoiled
    report = replica.inner_step(1)
    assert report.left_out == "memory"
    assert not replica.passes.is_spoiled


def test_a_pass_that_fails_before_any_gradient_spoils_nothing() -> None:
    replica = replica_of(1, 2, False, Execution())
    inputs, labels, _ = microbatch(replica)
    fail_at(replica, frozenset({0}))

    def forward(*_: Any) -> Any:
        raise Short("CUDA out of memory")

    replica.passes._compute = forward
    with pytest.raises(Short):
        replica.passes.last_stage(inputs, labels)
    assert not replica.passes.is_spoiled
    assert not replica.flat.gradients.any()


def test_a_loss_that_is_not_finite_takes_back_what_a_pass_that_was_resumed_had_added() -> None:
    replica = replica_of(0, 1, False, Execution(at_once=1))
    tokens, labels, _ = microbatch(replica)
    usual: Callable[..., Any] = replica.passes._head_loss
    losses = itertools.count()

    def head_loss(*given: Any, **named: Any) -> Any:
        head = usual(*given, **named)
        return replace(head, loss=head.loss * float("nan")) if next(losses) == 3 else head

    replica.passes._head_loss = head_loss  # type: ignore[method-assign]
    fail_at(replica, frozenset({5}))
    with pytest.raises(Short):
        replica.passes.last_stage(tokens, labels)
    with pytest.raises(NonFinite):
        replica.passes.last_stage(tokens, labels)
    assert not replica.passes.is_spoiled
    assert replica.flat.gradients.abs().max() < 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_that_is_given_up_leaves_no_weights_behind(precision: Any) -> None:
    replica = replica_of(1, 2, False, Execution(precision=precision))
    inputs, labels, _ = microbatch(replica)
    replica.passes.last_stage(inputs, labels)
    stage, passes = weakref.ref(replica.stage), weakref.ref(replica.passes)
    parameters = [weakref.ref(parameter) for parameter in replica.stage.parameters()]
    del replica
    gc.collect()
    assert (stage(), passes()) == (None, None)
    assert [parameter() for parameter in parameters] == [None] * len(parameters)


@pytest.mark.parametrize("at_once", [0, 1, 2])
def test_a_microbatch_is_judged_by_its_whole_loss_however_it_is_sliced(at_once: int) -> None:
    replica = replica_of(1, 2, False, Execution(at_once=at_once))
    inputs, labels, _ = microbatch(replica)
    each = [
        replica.passes.last_stage(inputs[i : i + 1], labels[i : i + 1])[0].item() for i in range(SEQUENCES)
    ]
    mean = sum(each) / SEQUENCES
    assert mean + 0.001 < max(each)
    replica.forget_gradients()
    replica.passes.last_stage(inputs, labels, mean + 0.001)
    before = replica.flat.gradients.clone()
    with pytest.raises(OddLoss) as caught:
        replica.passes.last_stage(inputs, labels, mean - 0.001)
    assert caught.value.loss == pytest.approx(mean)
    assert torch.allclose(replica.flat.gradients, before, atol=1e-6)
    with pytest.raises(OddLoss) as early:  # certain after the first slice
        replica.passes.last_stage(inputs, labels, 0.01 * mean)
    assert early.value.loss == pytest.approx(sum(each[: at_once or None]) / (at_once or SEQUENCES))
