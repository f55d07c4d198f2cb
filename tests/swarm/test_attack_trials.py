"""`noloco simulate attacks`: each kind of attacker trains along, does what it is named for, and the table tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bootstrap.lab.simulation.attacks import NOBODY, WORK, attack_rows, attack_settings
from bootstrap.lab.simulation.learning import LearningResult, LearningSetting, simulate
from bootstrap.lab.simulation.liars import (
    LIES,
    CachedAnswers,
    FlippedLabels,
    WrongActivations,
    WrongGradients,
)
from bootstrap.lab.simulation.study import one_setting
from node.model.passes import Passes
from node.model.replica import Replica
from node.storage.position import Position
from protocol.run.manifest import load_preset
from tests.swarm.micro import micro_batch, micro_corpus, micro_manifest

MANIFEST = micro_manifest(stages=2)


def setting(steps: int, replicas: int = 4) -> LearningSetting:
    chosen = {"outer.clip": 1.5, "outer.inner_steps": 3}
    made = one_setting(load_preset("tiny"), steps, 1, 1, replicas=replicas, stages=2, chosen=chosen)
    return replace(made, validation_sequences=8)


def lying(passes: type[Passes], stage: int) -> Replica:
    replica = Replica(MANIFEST, stage)
    replica.passes = passes(replica.stage, replica.device, replica.slow_weights())
    return replica


def hidden(seed: int) -> torch.Tensor:
    shape = 2, MANIFEST.data.sequence_tokens, MANIFEST.model.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_who_sends_wrong_activations_sends_noise_of_the_usual_size_and_trains_on() -> None:
    liar, honest = lying(WrongActivations, 0), Replica(MANIFEST, 0)
    inputs, _ = micro_batch(1, 2, MANIFEST.data.sequence_tokens)
    leaf, outputs = liar.passes.forward(inputs)
    _, right = honest.passes.forward(inputs)
    assert outputs.std().item() == pytest.approx(right.std().item(), rel=0.1)
    likeness = torch.nn.functional.cosine_similarity(outputs.flatten(), right.flatten(), dim=0)
    assert abs(likeness.item()) < 0.1
    liar.passes.backward(leaf, outputs, torch.ones_like(outputs))
    assert liar.flat.gradients.any()


def test_who_gives_wrong_gradients_does_so_of_a_tenth_and_tells_the_right_loss() -> None:
    liar, honest, wrong = lying(WrongGradients, 1), Replica(MANIFEST, 1), 0
    _, labels = micro_batch(1, 2, MANIFEST.data.sequence_tokens)
    for seed in range(200):
        loss, gradient = liar.passes.last_stage(hidden(seed), labels)
        right_loss, right = honest.passes.last_stage(hidden(seed), labels)
        assert loss.item() == right_loss.item()
        assert gradient is not None
        assert right is not None
        wrong += torch.equal(gradient, -right)
        assert torch.equal(gradient.abs(), right.abs())
    assert 10 <= wrong <= 32


def test_a_free_rider_computes_once() -> None:
    liar = lying(CachedAnswers, 1)
    _, labels = micro_batch(1, 2, MANIFEST.data.sequence_tokens)
    first = liar.passes.last_stage(hidden(0), labels)
    gradients = liar.flat.gradients.clone()
    second = liar.passes.last_stage(hidden(1), labels)
    assert first[0].item() == second[0].item()
    assert second[1] is not None
    assert torch.equal(second[1], first[1] if first[1] is not None else torch.empty(0))
    assert torch.equal(liar.flat.gradients, gradients)


def test_flipped_labels_are_those_of_the_other_end_of_the_vocabulary() -> None:
    data = micro_corpus()
    drawn = "run", "peer", MANIFEST, Position(data.identity)
    (inputs, labels), position = next(data.batches(*drawn))
    (same, flipped), same_position = next(FlippedLabels(data).batches(*drawn))
    assert torch.equal(inputs, same)
    assert torch.equal(flipped, MANIFEST.model.vocab_size - 1 - labels)
    assert position == same_position
    assert FlippedLabels(data).identity == data.identity


def test_a_run_with_attackers_is_measured_by_its_honest_peers() -> None:
    outcome = simulate(replace(setting(steps=6), attack="cached-answers", attackers=0.25))
    assert outcome.setting["attack"] == "cached-answers"
    assert len(outcome.losses) == 3  # of the honest rows
    assert outcome.found is not None
    assert 0.0 <= outcome.found <= 1.0


@pytest.mark.long
@pytest.mark.parametrize("attack", LIES)
def test_every_kind_of_attacker_can_be_tried(attack: str) -> None:
    outcome = simulate(replace(setting(steps=6), attack=attack, attackers=0.25))
    assert 0 < outcome.loss < 20
    assert outcome.blamed == 0


def result(seed: int, loss: float, attack: str = "", found: float | None = None) -> LearningResult:
    facts = {"seed": seed, "method": "noloco"} | ({"attack": attack, "attackers": 0.2} if attack else {})
    after = 100.0 * (seed + 1) if found else None
    return LearningResult(f"{attack}{seed}", facts, loss=loss, found=found, found_after=after, blamed=seed)


def test_rows_compare_seed_by_seed_with_where_nobody_attacks() -> None:
    rows = attack_rows(
        [result(0, 2.0), result(1, 2.2), result(0, 2.1, "drift", 1.0), result(1, 2.2, "drift", 0.5)]
    )
    assert [row["attack"] for row in rows] == [NOBODY, "drift"]
    assert rows[0]["harm"] is None
    assert rows[1]["harm"] == pytest.approx(0.05)
    assert rows[1]["worst"] == pytest.approx(0.1)
    assert rows[1]["found"] == 0.75
    assert rows[1]["microbatches_until_found"] == 150
    assert rows[1]["honest_set_aside"] == 1


def test_each_kind_and_share_is_tried_with_each_seed_after_the_undisturbed() -> None:
    undisturbed = [setting(4), replace(setting(4), seed=1)]
    settings = list(attack_settings(undisturbed, ["drift", "scaled"], [0.1, 0.2]))
    assert settings[:2] == [replace(each, work=WORK) for each in undisturbed]
    assert len({each.key for each in settings}) == 2 + 2 * 2 * 2
