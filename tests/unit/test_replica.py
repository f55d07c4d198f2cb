"""A replica against plain torch: the same gradients, steps and rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from node.model.inner import learning_rate
from node.model.outer import OuterSettings, contribution, outer_step
from node.model.replica import Replica
from protocol.run.manifest import Manifest
from tests.copied_state import copied_state
from tests.pretrained import transformers_config
from tests.swarm.micro import micro_manifest
from tests.unit.replicas import (
    MICROBATCHES,
    batch,
    carry,
    gradients_of,
    manifest_cut,
    replicas_of,
    train_step,
    weights_of,
)


class PlainLoop:
    """What a textbook does on one machine with the whole model."""

    def __init__(self, manifest: Manifest, weights: dict[str, torch.Tensor]) -> None:
        self.manifest = manifest
        self.model = LlamaForCausalLM(transformers_config(manifest))
        self.model.load_state_dict(weights)
        inner = manifest.inner
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            list[dict[str, Any]]([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]),
            betas=(inner.beta1, inner.beta2),
            eps=inner.eps,
            weight_decay=inner.weight_decay,
        )

    def gradients(self, seed: int) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for i in range(MICROBATCHES):
            tokens, labels = batch(self.manifest, 10 * seed + i)
            loss = F.cross_entropy(self.model(tokens).logits.flatten(0, 1), labels.flatten())
            (loss / MICROBATCHES).backward()
            total += loss.item()
        return total / MICROBATCHES

    def step(self, seed: int) -> float:
        loss = self.gradients(seed)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.manifest.inner, seed)
        self.optimizer.step()
        return loss


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert set(left) == set(right)
    for name in left:
        assert torch.allclose(left[name], right[name], atol=atol, rtol=1e-4), name


# --- against plain torch ------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_pipeline_computes_the_gradients_of_the_whole_model(stages: int) -> None:
    manifest = manifest_cut(stages)
    replicas = replicas_of(manifest)
    loop = PlainLoop(manifest, weights_of(replicas))
    expected = loop.gradients(seed=0)
    losses = [carry(replicas, *batch(manifest, i)) for i in range(MICROBATCHES)]
    assert sum(losses) / MICROBATCHES == pytest.approx(expected, rel=1e-5)
    means = {name: gradient / MICROBATCHES for name, gradient in gradients_of(replicas).items()}
    plain = {name: p.grad for name, p in loop.model.named_parameters() if p.grad is not None}
    assert means["model.embed_tokens.weight"].any()  # the public code loses it
    assert_same(means, plain, atol=1e-7)


@pytest.mark.parametrize("stages", [1, 2])
def test_inner_steps_are_those_of_plain_adamw(stages: int) -> None:
    manifest = manifest_cut(stages)
    replicas = replicas_of(manifest)
    loop = PlainLoop(manifest, weights_of(replicas))
    for seed in range(8):
        assert train_step(replicas, seed) == pytest.approx(loop.step(seed), rel=1e-4)
    assert_same(weights_of(replicas), dict(loop.model.named_parameters()), atol=2e-5)


def test_a_large_gradient_is_clipped_to_the_manifests_norm() -> None:
    def moved(clip: float) -> tuple[float, torch.Tensor]:
        [replica] = replicas_of(manifest_cut(1, inner__clip_norm=clip, inner__eps=1.0))
        carry([replica], *batch(replica.manifest, 0))
        norm = replica.inner_step(1).gradient_norm
        return norm, replica.optimizer.moments[0].clone()

    norm, free = moved(1e6)
    reported, clipped = moved(0.01)
    assert reported == pytest.approx(norm)  # told as it was
    assert norm > 0.01
    assert torch.allclose(clipped, free * (0.01 / norm), atol=1e-9)


def test_gradients_are_cleared_by_a_step() -> None:
    [replica] = replicas_of(manifest_cut(1))
    carry([replica], *batch(replica.manifest, 0))
    assert replica.flat.gradients.any()
    train_step([replica], 0)
    assert not replica.flat.gradients.any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights_and_the_next_step_works(poison: float) -> None:
    [replica] = replicas_of(manifest_cut(1))
    train_step([replica], 0)
    before = copied_state(replica)
    carry([replica], *batch(replica.manifest, 0))
    replica.flat.gradients[7] = poison
    report = replica.inner_step(1)
    assert not math.isfinite(report.gradient_norm)
    assert report.step == replica.step == 2
    after = copied_state(replica)
    assert all(
        torch.equal(getattr(before, name), getattr(after, name))
        for name in ("theta", "phi", "first_moment", "second_moment")
    )
    train_step([replica], 1)
    assert torch.isfinite(replica.flat.values).all()
    assert not torch.equal(replica.flat.values, before.theta)


# --- rounds -------------------------------------------------------------------------------------


def test_a_round_alone_is_the_outer_step_with_own_progress() -> None:
    [replica] = replicas_of(manifest_cut(1))
    settings = OuterSettings(0.5, 0.7, 0.7)
    phi, delta = replica.phi.clone(), replica.delta.clone()
    for number in range(2):
        for seed in range(3):
            train_step([replica], seed)
        theta = replica.flat.values.clone()
        replica.finish_round_alone(replica.whole)
        outer_step(phi, delta, contribution(theta, phi, settings), settings)
        assert torch.equal(replica.phi, phi)
        assert torch.equal(replica.delta, delta)
        assert torch.equal(replica.flat.values, replica.phi)  # θ starts the next round from φ
        assert (replica.round, replica.steps_in_round, replica.step) == (number + 1, 0, 3 * number + 3)


def test_without_momentum_a_round_alone_moves_by_beta_of_the_progress() -> None:
    [replica] = replicas_of(manifest_cut(1, outer__alpha=0.0))
    start = replica.phi.clone()
    train_step([replica], 0)
    progress = replica.flat.values - start
    replica.finish_round_alone(replica.whole)
    assert torch.allclose(replica.phi, start + 0.7 * progress, atol=1e-7)


def test_a_pair_with_the_same_mean_comes_nearer() -> None:
    pair = [Replica(manifest_cut(1), 0) for _ in range(2)]
    for number, replica in enumerate(pair):
        for seed in range(3):
            train_step([replica], 10 * number + seed)
        replica.finish_round_alone(replica.whole)  # alone: they drift apart
    apart = (pair[0].phi - pair[1].phi).norm()
    for _ in range(6):
        mean = torch.stack([replica.whole.contribution() for replica in pair]).mean(0)
        for replica in pair:
            replica.finish_round(mean)
    assert (pair[0].phi - pair[1].phi).norm() < 0.2 * apart


def test_evaluation_uses_the_slow_weights_and_changes_nothing() -> None:
    manifest = manifest_cut(1)
    [replica] = replicas_of(manifest)
    tokens, labels = batch(manifest, 99)
    at_start = replica.passes.evaluate(tokens)
    for seed in range(3):
        train_step([replica], seed)
    carry([replica], tokens, labels)
    before = replica.flat.gradients.clone()
    assert torch.equal(replica.passes.evaluate(tokens), at_start)  # θ has moved, φ has not
    assert not torch.equal(replica.stage(tokens).detach(), at_start)
    assert torch.equal(replica.flat.gradients, before)
    replica.finish_round_alone(replica.whole)
    assert not torch.equal(replica.passes.evaluate(tokens), at_start)
    assert torch.equal(replica.passes.evaluate(tokens), replica.stage(tokens).detach())


def test_what_comes_back_in_a_ring_teaches_the_head_only_when_it_is_to_learn() -> None:
    replica = Replica(micro_manifest(model__tied_embeddings=True), 0)
    hidden, labels = torch.randn(2, 32, 16), torch.zeros(2, 32, dtype=torch.long)
    loss, by_inputs = replica.passes.head(hidden, labels, learns=False)
    assert not replica.flat.gradients.any()
    again, again_by_inputs = replica.passes.head(hidden, labels, learns=True)
    assert replica.flat.gradients.any()
    assert torch.equal(loss, again)
    assert torch.equal(by_inputs, again_by_inputs)
