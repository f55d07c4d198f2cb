"""What a replica holds: it goes on from a snapshot or a download as the other would have, and NaN stays here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import node.model.replica
from node.model.replica import Replica, digest_of
from node.model.transfer import transfer_for
from node.rounds.contribution import OutgoingUpdate
from node.storage.stage_state import StageState
from protocol.errors import CodecError, Refused
from tests.copied_state import copied_state
from tests.unit.replicas import MICROBATCHES, batch, carry, manifest_cut, replicas_of, train_step

CPU = torch.device("cpu")


def trained(stages: int = 1, index: int = 0) -> Replica:
    """A replica in the middle of its second round."""
    replicas = replicas_of(manifest_cut(stages))
    for seed in range(3):
        train_step(replicas, seed)
    for replica in replicas:
        replica.finish_round_alone(replica.whole)
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
    restored.restore(copied_state(original))
    assert_same_state(copied_state(restored), copied_state(original))
    for seed in range(4, 8):
        assert train_step([restored], seed) == train_step([original], seed)
    for replica in (original, restored):
        replica.finish_round_alone(replica.whole)
        train_step([replica], 9)
    assert_same_state(copied_state(restored), copied_state(original))


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
        with pytest.raises(Refused, match="NaN or infinity"):
            replica.read_piece(0, moments)
    for wire in ({}, {"gossip": "fp16"}, {"gossip": "bf16"}, {"gossip": "int8"}):
        offer = OutgoingUpdate(
            replica.whole, {"z": 1.0}, replica.manifest.wire.model_copy(update=wire), transfer_for(CPU)
        )
        with pytest.raises(CodecError):
            offer.encode("z", replica.whole.piece(0))


def test_a_dropped_step_is_no_update_of_adamw_also_after_a_restore() -> None:
    [replica] = replicas_of(manifest_cut(1))
    for seed in range(6):
        carry([replica], *batch(replica.manifest, seed))
        replica.flat.gradients[7] = math.nan if seed % 2 else 0.0
        replica.inner_step(1)
    restored = Replica(replica.manifest, 0)
    restored.restore(copied_state(replica))
    assert (restored.step, restored.optimizer.updates) == (6, 3)
    train_step([replica], 6)
    train_step([restored], 6)
    assert_same_state(copied_state(restored), copied_state(replica))


def test_gradients_of_the_state_before_do_not_move_an_adopted_one() -> None:
    """Nor do those of microbatches that had run forward when it came: their batch is left out."""
    [replica], donor = replicas_of(manifest_cut(1)), trained()
    carry([replica], *batch(replica.manifest, 0))
    pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.whole.pieces)}
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
    replica.restore(copied_state(donor))
    carry([replica], *batch(replica.manifest, 0))
    assert replica.inner_step(1).left_out == ""


def test_a_snapshot_is_a_copy() -> None:
    replica = trained()
    snapshot = copied_state(replica)
    theta = snapshot.theta.clone()
    train_step([replica], 5)
    assert torch.equal(snapshot.theta, theta)


def test_a_snapshot_of_another_stage_is_refused() -> None:
    with pytest.raises(CodecError, match="parameters"):
        trained(2, 0).restore(copied_state(trained(2, 1)))


def test_a_snapshot_with_a_tensor_of_another_size_is_refused_whole() -> None:
    replica = trained()
    before = copied_state(replica)
    damaged = replace(before, step=99, delta=before.delta[:-1], phi=before.phi + 1)
    with pytest.raises(CodecError):
        replica.restore(damaged)
    assert_same_state(copied_state(replica), before)


def test_a_download_in_pieces_gives_the_donors_state_from_its_slow_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node.model.fragment, "PIECE_PARAMETERS", 1000)
    donor = trained()
    joiner = Replica(donor.manifest, 0)
    pieces = {index: donor.read_piece(index, moments=True) for index in range(donor.whole.pieces)}
    assert sum(tensors[0].numel() for tensors in pieces.values()) == donor.parameters
    joiner.adopt(pieces, donor.step, donor.round)
    expected = replace(copied_state(donor), theta=donor.phi, steps_in_round=0)
    assert_same_state(copied_state(joiner), expected)
    assert joiner.steps_in_round == 0
    donor.flat.values.copy_(donor.phi)
    assert train_step([joiner], 7) == train_step([donor], 7)
    assert torch.equal(joiner.flat.values, donor.flat.values)  # AdamW's moments and step count came along


def test_a_piece_beyond_the_end_is_refused() -> None:
    replica = trained()
    with pytest.raises(Refused, match="pieces"):
        replica.read_piece(replica.whole.pieces, moments=False)
    assert replica.read_piece(0, moments=False)[0].shape == (min(replica.parameters, 2**18),)
    assert len(replica.read_piece(0, moments=False)) == 1


def test_a_piece_of_the_wrong_shape_changes_nothing() -> None:
    replica = trained()
    before = copied_state(replica)
    with pytest.raises(CodecError):
        replica.write_piece(0, replica.read_piece(0, moments=False))
    with pytest.raises(CodecError):
        replica.write_piece(0, [tensor[:-1] for tensor in replica.read_piece(0, moments=True)])
    assert_same_state(copied_state(replica), before)


def test_a_digest_notices_every_bit() -> None:
    tensors = [torch.arange(5.0), torch.zeros(3)]
    other = [tensor.clone() for tensor in tensors]
    assert digest_of(tensors) == digest_of(other)
    other[1][2] = -0.0
    assert digest_of(tensors) != digest_of(other)
