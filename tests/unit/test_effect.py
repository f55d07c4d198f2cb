"""What a partner's pull would do to the loss decides how much of it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from node.model.execution import Execution
from node.model.probes import KEPT, TOKENS, Probes
from node.model.replica import Replica
from node.model.stage_work import StageWork
from node.model.transfer import transfer_for
from node.rounds.effect import LEAST, LEAST_VOTES, Effect, bounded_mean
from protocol.codecs.codec import as_read
from protocol.ground import PeerId
from tests.swarm.micro import micro_batch, micro_manifest

MANIFEST = micro_manifest(stages=2)
STEPS = 12


class Trained:
    """A replica of each stage after some steps of training. Mutable state: these, and their work."""

    def __init__(self, stage: int) -> None:
        self.replicas = [Replica(MANIFEST, number) for number in range(2)]
        self.work = [
            StageWork(MANIFEST, replica.passes, transfer_for(replica.device)) for replica in self.replicas
        ]
        self.effect = Effect(self.replicas[stage], self.replicas[stage].whole)
        self.replica = self.replicas[stage]
        for step in range(STEPS):
            self.step(step)

    def step(self, seed: int) -> None:
        inputs, labels = micro_batch(seed, 4, MANIFEST.data.sequence_tokens)
        first, last = self.work
        leaf, outputs, parcel = first.forward(inputs, labels)
        activations = as_read(parcel.wait()[0])
        _, answer = last.last_stage(activations, labels).wait()
        first.backward(leaf, outputs, as_read(answer[0])).wait()
        for replica in self.replicas:
            replica.inner_step(1)

    def undo(self, part: float) -> torch.Tensor:
        return part * (self.replica.phi - self.replica.flat.values)


@pytest.mark.parametrize("stage", [0, 1])
def test_undoing_progress_raises_the_loss_and_changes_nothing_here(stage: int) -> None:
    trained = Trained(stage)
    before = trained.replica.flat.values.clone()
    change = trained.effect.change(trained.undo(1.0))
    assert change is not None
    assert change > (0.05 if stage else 0.001)  # the first stage sees it to first order, and has less of it
    assert abs(trained.effect.change(torch.zeros_like(before)) or 0.0) < 1e-6
    assert torch.equal(trained.replica.flat.values, before)
    assert not trained.replica.flat.gradients.any()


def test_gradients_that_are_in_already_stay() -> None:
    trained = Trained(1)
    inputs, labels = micro_batch(99, 2, MANIFEST.data.sequence_tokens)
    with torch.no_grad():
        hidden = trained.replicas[0].passes.evaluate(inputs)
    trained.replica.passes.last_stage(hidden, labels)
    gradients = trained.replica.flat.gradients.clone()
    assert gradients.any()
    assert trained.effect.change(trained.undo(0.5)) is not None
    assert torch.equal(trained.replica.flat.gradients, gradients)


def test_before_partners_are_known_more_than_a_part_of_the_own_progress_is_not_undone_whole() -> None:
    trained = Trained(1)
    change = trained.effect.change(trained.undo(2.0))
    assert change is not None
    kept, _ = trained.effect.kept(PeerId("first"), change)
    assert kept < 0.1
    assert trained.effect.kept(PeerId("second"), LEAST / 2) == (1.0, False)


def test_what_partners_usually_change_is_kept_and_what_is_far_above_is_not() -> None:
    effect = Trained(1).effect
    for number in range(LEAST_VOTES + 3):
        effect.kept(PeerId(f"honest {number}"), 0.02 * (-1) ** number)
    assert effect.kept(PeerId("honest 9"), 0.02) == (1.0, False)
    assert effect.kept(PeerId("honest 8"), -3.0) == (1.0, False)
    kept, is_offence = effect.kept(PeerId("liar"), 3.0)
    assert kept == pytest.approx((1.5 * 0.02 / 3.0) ** 2)
    assert is_offence
    assert effect.kept(PeerId("liar"), float("nan")) == (0.0, True)


def test_a_partner_that_undoes_a_little_each_time_counts_less_and_less() -> None:
    effect = Trained(1).effect
    for number in range(LEAST_VOTES + 3):
        effect.kept(PeerId(f"honest {number}"), 0.02 * (-1) ** number)
    kept = [effect.kept(PeerId("liar"), 0.027)[0] for _ in range(4)]
    assert kept[0] == 1.0
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < 0.5
    assert [effect.kept(PeerId("honest 9"), 0.018 * (-1) ** turn)[0] for turn in range(8)] == [1.0] * 8


def test_two_liars_of_six_partners_do_not_make_room_for_a_third() -> None:
    effect = Trained(1).effect
    for number in range(4):
        effect.kept(PeerId(f"honest {number}"), 0.01 * (-1) ** number)
    for number in range(2):
        effect.kept(PeerId(f"liar {number}"), 0.4)
    assert effect.kept(PeerId("liar 2"), 0.1)[0] < 0.05


def test_what_all_partners_do_alike_is_usual() -> None:
    effect = Trained(1).effect
    for turn in range(10):
        for number in range(7):
            wave = 0.01 * (-1) ** (turn + number)
            kept, is_offence = effect.kept(PeerId(f"honest {number}"), 0.05 + wave)
            assert turn < 2 or (kept, is_offence) == (1.0, False)


def test_who_is_merely_slow_counts_less_and_is_not_accused() -> None:
    trained = Trained(1)
    for number in range(LEAST_VOTES + 3):
        trained.effect.kept(PeerId(f"honest {number}"), 0.001 * (-1) ** number)
    half_way = trained.effect.change(trained.undo(0.5))
    assert half_way is not None
    assert half_way > 10 * LEAST
    for _ in range(5):
        kept, is_offence = trained.effect.kept(PeerId("slow"), half_way)
        assert kept < 0.1
        assert not is_offence


def test_a_few_tokens_that_first_order_knows_nothing_about_do_not_decide() -> None:
    changes = torch.full((100,), 0.01)
    changes[:3] = -10.0
    assert bounded_mean(changes) > 0.005


def test_of_long_sequences_the_beginning_is_kept() -> None:
    probes = Probes()
    for _ in range(KEPT + 2):
        probes.keep(torch.zeros(2, 2 * TOKENS, 3), torch.ones(2, 2 * TOKENS, 3))
    losses = probes.losses(lambda inputs: inputs + 1)
    assert losses is not None
    assert losses.shape == (KEPT * TOKENS,)
    assert losses[0] == 3 * 2 * 2 * TOKENS  # the gradient of the mean, as one of a token


def test_a_minority_of_liars_does_not_move_what_is_usual() -> None:
    effect = Trained(1).effect
    for turn in range(20):
        for number in range(5):
            effect.kept(PeerId(f"honest {number}"), 0.01 * (-1) ** (turn + number))
        for number in range(2):
            effect.kept(PeerId(f"liar {number}"), 5.0)
    kept, _ = effect.kept(PeerId("liar 0"), 5.0)
    assert kept < 1e-4


def test_without_anything_trained_nothing_is_tried() -> None:
    replica = Replica(MANIFEST, 1)
    assert Effect(replica, replica.whole).change(torch.zeros(replica.parameters)) is None


def test_sequences_go_through_a_small_model_together_and_through_a_large_one_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = Probes()
    for number in range(KEPT):
        tokens = 2 * TOKENS if number < KEPT - 1 else 5  # the last one is short
        probes.keep(torch.full((1, tokens, 3), float(number)), torch.ones(1, tokens, 3))
    passes: list[int] = []

    def run(inputs: torch.Tensor) -> torch.Tensor:
        passes.append(len(inputs))
        return inputs + 1

    first, second = probes.losses(run), probes.losses(run)
    assert first is not None
    assert second is not None
    assert passes[KEPT:] == [KEPT - 1, 1]  # how large an output is was seen in the first pass of all
    assert torch.equal(first, second)
    monkeypatch.setattr("node.model.probes.MOST_VALUES", 3 * 3 * TOKENS)
    for _ in range(2):
        probes.losses(run)
    assert passes[-4:] == [3, 3, 1, 1]


@pytest.mark.parametrize("stage", [0, 1])
def test_in_bf16_it_is_tried_in_bf16_and_finds_the_same(stage: int) -> None:
    trained = Trained(stage)
    exact = trained.effect.change(trained.undo(1.0))
    trained.replica.passes.execute(Execution("bf16"))
    products = list[torch.dtype]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func) == "aten.mm.default":
                products.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Products():
        change = trained.effect.change(trained.undo(1.0))
    assert exact is not None
    assert change == pytest.approx(exact, rel=0.1)
    assert set(products) == {torch.bfloat16}
