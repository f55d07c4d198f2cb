"""The attackers that the defence is measured against do what they claim; so does the loop that measures."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from poisoning.poisoned_stage import PoisonedStage, PoisonSetting, gradients_of, train_poisoned

from bootstrap.lab.simulation.attackers import KINDS, Attack, Attacker, Kind
from bootstrap.lab.simulation.learning import text_of
from node.model.fragment import EVERYTHING
from node.model.replica import Replica
from node.rounds.defence import blocks_of
from tests.swarm.micro import micro_batch, micro_manifest

MANIFEST = micro_manifest(stages=1)
STEPS = 3


def trained(replica: Replica, seed: int) -> Replica:
    for step in range(STEPS):
        batch = micro_batch((seed, step), 2, MANIFEST.data.sequence_tokens)
        replica.passes.last_stage(*batch)
        replica.inner_step(1)
    return replica


def honest_replicas(count: int = 6) -> list[Replica]:
    return [trained(Replica(MANIFEST, 0), seed) for seed in range(count)]


def attacker(attack: Attack, honest: list[Replica], number: int = 0) -> Attacker:
    made = Attacker(MANIFEST, 0, attack=attack, honest=lambda: honest, number=number)
    trained(made, 100 + number)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_naive_attacker_sends_its_strength_in_lengths_of_its_own_progress(kind: Kind) -> None:
    made = attacker(Attack(kind, strength=10.0), honest_replicas())
    own = made.flat.values - made.phi
    sent = made.offered_theta(EVERYTHING) - made.phi
    assert float(sent.norm()) == pytest.approx(10 * float(own.norm()), rel=1e-3)
    if kind == "sign-flip":
        assert torch.allclose(sent, -10 * own, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tuned_attacker_stays_just_inside_the_radius_of_every_block(kind: Kind) -> None:
    honest = honest_replicas()
    made = attacker(Attack(kind, clip=1.5), honest)
    contributions = torch.stack([replica.whole.contribution() for replica in honest])
    sent, centre = made.whole.contribution(), contributions.mean(0)
    for block in blocks_of(made.flat.slices, made.whole.bounds):
        variance = float((contributions[:, block] - centre[block]).square().sum(1).mean())
        pair = (2 * variance) ** 0.5
        to_victims = (float((sent[block] - centre[block]).square().sum()) + variance) ** 0.5
        assert to_victims == pytest.approx(0.95 * 1.5 * pair, rel=0.01)


def test_colluders_send_one_direction_and_noise_is_everyones_own() -> None:
    honest = honest_replicas()

    def told(kind: Kind) -> list[torch.Tensor]:
        attackers = [attacker(Attack(kind, clip=1.5), honest, number) for number in range(2)]
        return [each.whole.contribution() - each.whole.settings.gamma * each.phi for each in attackers]

    alike = partial(torch.nn.functional.cosine_similarity, dim=0)
    assert alike(*told("collusion")) > 0.99
    assert alike(*told("noise")) < 0.9


def test_an_attacker_goes_on_from_the_honest_mean() -> None:
    honest = honest_replicas()
    made = attacker(Attack("noise", strength=1e6), honest)
    poison = made.whole.contribution()
    assert torch.equal(poison, made.whole.contribution())  # the same for every piece of a round
    made.finish_round_alone(made.whole)
    assert torch.equal(made.phi, torch.stack([replica.phi for replica in honest]).mean(0))
    assert torch.equal(made.flat.values, made.phi)
    assert made.round == 1


def test_the_gradients_of_all_replicas_at_once_are_those_of_each() -> None:
    replicas = honest_replicas(3)
    batches = [micro_batch(seed, 2, MANIFEST.data.sequence_tokens) for seed in range(3)]
    together = gradients_of(replicas[0])(replicas, batches)
    for replica, batch, gradient in zip(replicas, batches, together, strict=True):
        replica.flat.gradients.zero_()
        replica.passes.last_stage(*batch)
        assert torch.allclose(gradient, replica.flat.gradients, atol=1e-6)


@pytest.mark.long
def test_the_defence_helps_and_costs_nothing() -> None:
    def loss(clip: float, attackers: int) -> float:
        attack = Attack("sign-flip") if attackers else None
        return train_poisoned(
            PoisonSetting(attack, attackers, replicas=6, clip=clip, steps=15, inner_steps=3)
        ).loss

    plain = loss(0.0, 0)
    assert loss(1.5, 0) == pytest.approx(plain, abs=0.01)
    assert loss(1.5, 1) - plain < 0.5 * (loss(0.0, 1) - plain)


def test_repeat_offenders_are_left_alone() -> None:
    setting = PoisonSetting(Attack("constant"), attackers=1, replicas=3, clip=1.5, steps=30, inner_steps=2)
    stage = PoisonedStage(setting, text_of(setting.manifest))
    stage.train()
    outcome = stage.outcome()
    assert outcome.quarantined_attackers >= 2
    assert outcome.quarantined_honest == 0
