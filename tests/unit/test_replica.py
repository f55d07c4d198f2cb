"""A replica against plain torch: the same gradients, steps and rounds, and it goes on from its own state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

import node.model.replica
from node.model.flat import StageState
from node.model.inner import learning_rate
from node.model.outer import OuterSettings, contribution, outer_step
from node.model.replica import Replica, digest_of
from node.model.stage import model_config
from node.rounds.outgoing_update import OutgoingUpdate
from protocol.errors import CodecError, Refused
from protocol.manifest import Manifest
from tests.swarm.micro import micro_batch, micro_manifest

MICROBATCHES = 2


def manifest_cut(stages: int, **changes: Any) -> Manifest:
    changes.setdefault("inner__weight_decay", 0.1)
    changes.setdefault("inner__clip_norm", 1e6)  # per stage in the swarm, over the whole model in the loop
    return micro_manifest(stages=stages, model__layers=4, **changes)


def replicas_of(manifest: Manifest) -> list[Replica]:
    return [Replica(manifest, index) for index in range(manifest.stages)]


def batch(manifest: Manifest, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return micro_batch(seed, manifest.inner.sequences, manifest.data.sequence_tokens)


def carry(replicas: list[Replica], tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """One microbatch through all stages and back, as the pipeline does it."""
    *before, last = replicas
    kept, hidden = [], tokens
    for replica in before:
        leaf, outputs = replica.passes.forward(hidden)
        kept.append((leaf, outputs))
        hidden = outputs.detach()
    loss, gradient = last.passes.loss_and_backward(hidden, labels)
    for replica, (leaf, outputs) in zip(reversed(before), reversed(kept), strict=True):
        assert gradient is not None
        gradient = replica.passes.backward(leaf, outputs, gradient)
    assert gradient is None  # tokens have none
    return loss


def train_step(replicas: list[Replica], seed: int) -> float:
    """One inner step of all stages; returns the mean loss."""
    manifest = replicas[0].manifest
    losses = [carry(replicas, *batch(manifest, 10 * seed + i)) for i in range(MICROBATCHES)]
    for replica in replicas:
        replica.inner_step(MICROBATCHES)
    return sum(losses) / MICROBATCHES


def weights_of(replicas: list[Replica]) -> dict[str, torch.Tensor]:
    return {place.name: place.of(r.flat.values).clone() for r in replicas for place in r.flat.slices}


def gradients_of(replicas: list[Replica]) -> dict[str, torch.Tensor]:
    return {place.name: place.of(r.flat.gradients).clone() for r in replicas for place in r.flat.slices}


class PlainLoop:
    """What a textbook does on one machine with the whole model."""

    def __init__(self, manifest: Manifest, weights: dict[str, torch.Tensor]) -> None:
        self.manifest = manifest
        self.model = LlamaForCausalLM(model_config(manifest))
        self.model.load_state_dict(weights)
        inner = manifest.inner
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
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
        return norm, replica.adamw.moments[0].clone()

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
    before = replica.snapshot()
    carry([replica], *batch(replica.manifest, 0))
    replica.flat.gradients[7] = poison
    report = replica.inner_step(1)
    assert not math.isfinite(report.gradient_norm)
    assert report.step == replica.step == 2
    after = replica.snapshot()
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
        replica.finish_round_alone()
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
    replica.finish_round_alone()
    assert torch.allclose(replica.phi, start + 0.7 * progress, atol=1e-7)


def test_a_pair_with_the_same_mean_comes_nearer() -> None:
    pair = [Replica(manifest_cut(1), 0) for _ in range(2)]
    for number, replica in enumerate(pair):
        for seed in range(3):
            train_step([replica], 10 * number + seed)
        replica.finish_round_alone()  # alone: they drift apart
    apart = (pair[0].phi - pair[1].phi).norm()
    for _ in range(6):
        mean = torch.stack([replica.contribution() for replica in pair]).mean(0)
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
    assert not torch.equal(replica.passes.forward(tokens)[1].detach(), at_start)
    assert torch.equal(replica.flat.gradients, before)
    replica.finish_round_alone()
    assert not torch.equal(replica.passes.evaluate(tokens), at_start)
    assert torch.equal(replica.passes.evaluate(tokens), replica.passes.forward(tokens)[1].detach())


# --- state --------------------------------------------------------------------------------------


def trained(stages: int = 1, index: int = 0) -> Replica:
    """A replica in the middle of its second round."""
    replicas = replicas_of(manifest_cut(stages))
    for seed in range(3):
        train_step(replicas, seed)
    for replica in replicas:
        replica.finish_round_alone()
    train_step(replicas, 3)
    return replicas[index]


def assert_same_state(left: StageState, right: StageState) -> None:
    for count in ("step", "round", "steps_in_round", "updates"):
        assert getattr(left, count) == getattr(right, count), count
    assert left.tensors().keys() == right.tensors().keys()
    for name, tensor in left.tensors().items():
        assert torch.equal(tensor, right.tensors()[name]), name


def test_a_restored_replica_goes_on_as_the_other_would_have() -> None:
    original = trained()
    restored = Replica(original.manifest, 0)
    restored.restore(original.snapshot())
    assert_same_state(restored.snapshot(), original.snapshot())
    for seed in range(4, 8):
        assert train_step([restored], seed) == train_step([original], seed)
    for replica in (original, restored):
        replica.finish_round_alone()
        train_step([replica], 9)
    assert_same_state(restored.snapshot(), original.snapshot())


def test_finite_gradients_have_a_finite_norm_however_large_they_are() -> None:
    replica = trained()
    carry([replica], *batch(replica.manifest, 0))
    replica.flat.gradients[:1000] = 3e38
    report = replica.inner_step(1)
    assert report.gradient_norm == pytest.approx(3e38 * math.sqrt(1000))
    assert report.left_out == "absurd"
    assert replica.is_finite()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_given_to_nobody(poison: float) -> None:
    replica = trained()
    assert replica.is_finite()
    replica.phi[3] = replica.flat.values[3] = poison
    assert not replica.is_finite()
    for moments in (True, False):
        with pytest.raises(Refused, match="not numbers"):
            replica.read_piece(0, moments)
    for wire in ({}, {"gossip": "fp16"}, {"gossip": "bf16"}, {"gossip": "int8"}):
        offer = OutgoingUpdate(replica, {"z": 1.0}, replica.manifest.wire.model_copy(update=wire))
        with pytest.raises(CodecError):
            offer.encode("z", [0])


def test_a_dropped_step_is_no_update_of_adamw_also_after_a_restore() -> None:
    [replica] = replicas_of(manifest_cut(1))
    for seed in range(6):
        carry([replica], *batch(replica.manifest, seed))
        replica.flat.gradients[7] = math.nan if seed % 2 else 0.0
        replica.inner_step(1)
    restored = Replica(replica.manifest, 0)
    restored.restore(replica.snapshot())
    assert (restored.step, restored.adamw.updates) == (6, 3)
    train_step([replica], 6)
    train_step([restored], 6)
    assert_same_state(restored.snapshot(), replica.snapshot())


def test_gradients_of_the_state_before_do_not_move_an_adopted_one() -> None:
    """Nor do those of microbatches that had run forward when it came: their batch is left out."""
    [replica], donor = replicas_of(manifest_cut(1)), trained()
    carry([replica], *batch(replica.manifest, 0))
    pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.pieces)}
    replica.adopt(pieces, donor.step, donor.round)
    assert not replica.flat.gradients.any()
    carry([replica], *batch(replica.manifest, 1))
    assert replica.inner_step(MICROBATCHES).left_out == "replaced"
    assert torch.equal(replica.flat.values, donor.phi)
    donor.flat.values.copy_(donor.phi)
    donor.step += 1  # the learning rate goes by the steps, those that were left out as well
    assert train_step([replica], 7) == train_step([donor], 7)
    assert torch.equal(replica.flat.values, donor.flat.values)


def test_a_state_that_comes_between_two_steps_costs_no_batch() -> None:
    replica, donor = trained(), trained()
    replica.restore(donor.snapshot())
    carry([replica], *batch(replica.manifest, 0))
    assert replica.inner_step(1).left_out == ""


def test_a_snapshot_is_a_copy() -> None:
    replica = trained()
    snapshot = replica.snapshot()
    theta = snapshot.theta.clone()
    train_step([replica], 5)
    assert torch.equal(snapshot.theta, theta)


def test_a_snapshot_of_another_stage_is_refused() -> None:
    with pytest.raises(CodecError, match="parameters"):
        trained(2, 0).restore(trained(2, 1).snapshot())


def test_a_snapshot_with_a_tensor_of_another_size_is_refused_whole() -> None:
    replica = trained()
    before = replica.snapshot()
    damaged = replace(before, step=99, delta=before.delta[:-1], phi=before.phi + 1)
    with pytest.raises(CodecError):
        replica.restore(damaged)
    assert_same_state(replica.snapshot(), before)


def test_a_download_in_pieces_gives_the_donors_state_from_its_slow_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node.model.replica, "PIECE_PARAMETERS", 1000)
    donor = trained()
    joiner = Replica(donor.manifest, 0)
    pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.pieces)}
    assert sum(tensors[0].numel() for tensors in pieces.values()) == donor.parameters
    joiner.adopt(pieces, donor.step, donor.round)
    expected = replace(donor.snapshot(), theta=donor.phi, steps_in_round=0)
    assert_same_state(joiner.snapshot(), expected)
    assert joiner.steps_in_round == 0
    donor.flat.values.copy_(donor.phi)
    assert train_step([joiner], 7) == train_step([donor], 7)
    assert torch.equal(joiner.flat.values, donor.flat.values)  # AdamW's moments and step count came along


def test_a_piece_beyond_the_end_is_refused() -> None:
    replica = trained()
    with pytest.raises(Refused, match="pieces"):
        replica.read_piece(replica.pieces, moments=False)
    assert replica.read_piece(0, moments=False)[0].shape == (min(replica.parameters, 2**18),)
    assert len(replica.read_piece(0, moments=False)) == 1


def test_a_piece_of_the_wrong_shape_changes_nothing() -> None:
    replica = trained()
    before = replica.snapshot()
    with pytest.raises(CodecError):
        replica.write_piece(0, replica.read_piece(0, moments=False))
    with pytest.raises(CodecError):
        replica.write_piece(0, [tensor[:-1] for tensor in replica.read_piece(0, moments=True)])
    assert_same_state(replica.snapshot(), before)


def test_a_digest_notices_every_bit() -> None:
    tensors = [torch.arange(5.0), torch.zeros(3)]
    other = [tensor.clone() for tensor in tensors]
    assert digest_of(tensors) == digest_of(other)
    other[1][2] = -0.0
    assert digest_of(tensors) != digest_of(other)


def test_what_comes_back_in_a_ring_teaches_the_head_only_when_it_is_to_learn() -> None:
    replica = Replica(micro_manifest(model__tied_embeddings=True), 0)
    hidden, labels = torch.randn(2, 32, 16), torch.zeros(2, 32, dtype=torch.long)
    loss, by_inputs = replica.passes.head(hidden, labels, learns=False)
    assert not replica.flat.gradients.any()
    again, again_by_inputs = replica.passes.head(hidden, labels, learns=True)
    assert replica.flat.gradients.any()
    assert torch.equal(loss, again)
    assert torch.equal(by_inputs, again_by_inputs)
