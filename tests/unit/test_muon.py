"""Muon for the layers' matrices: torch's own formula, state that goes on, and moments that can be looked at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from node.model import muon
from node.model.flat import layout
from node.model.inner import learning_rate
from node.model.memory_model import memory_of_state
from node.model.muon import muon_range, muon_workspace, orthogonalised
from node.model.replica import Replica
from node.model.stage import parameter_count, parameter_shapes
from node.state.transfer import within_piece
from node.state.witnesses import are_possible
from protocol.errors import ManifestError
from protocol.run.manifest import Manifest, as_toml, load_preset
from tests.copied_state import copied_state
from tests.unit.replicas import manifest_cut, replicas_of, train_step, weights_of

MUON = {"inner__optimizer": "muon", "inner__clip_norm": 1.0}


def gradients(replica: Replica, step: int) -> torch.Tensor:
    drawn = torch.randn(replica.parameters, generator=torch.Generator().manual_seed(step))
    return drawn / drawn.norm()


def is_muons(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and ".layers." in name


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 16), (1, 32, 32)])
def test_singular_values_become_about_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalised(matrices, torch.float32)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    diagonal = left.mT @ found @ right.mT
    sizes = diagonal.diagonal(dim1=-2, dim2=-1)
    assert sizes.min() > 0.3
    assert sizes.max() < 1.3
    assert (diagonal - torch.diag_embed(sizes)).abs().max() < 1e-3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none")
@pytest.mark.parametrize("muon_rate", [None, 0.02])
def test_steps_are_those_of_torchs_muon_and_for_the_rest_adamw(muon_rate: float | None) -> None:
    manifest = manifest_cut(1, **MUON, inner__muon_learning_rate=muon_rate)
    inner, replica, plain = manifest.inner, Replica(manifest, 0), Replica(manifest, 0)
    parameters = {
        place.name: torch.nn.Parameter(place.of(plain.flat.values).clone()) for place in plain.flat.slices
    }
    matrices = [p for name, p in parameters.items() if is_muons(name, tuple(p.shape))]
    ends = [p for name, p in parameters.items() if p.dim() == 2 and not is_muons(name, tuple(p.shape))]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    theirs = torch.optim.Muon(
        matrices, weight_decay=inner.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        list[dict[str, Any]]([{"params": ends}, {"params": vectors, "weight_decay": 0.0}]),
        betas=(inner.beta1, inner.beta2),
        eps=inner.eps,
        weight_decay=inner.weight_decay,
    )
    for step in range(6):
        given, rate = gradients(replica, step), learning_rate(inner, step)
        replica.flat.gradients.copy_(given)
        assert replica.inner_step(1).learning_rate == rate
        for place in plain.flat.slices:
            parameters[place.name].grad = place.of(given).clone()
        for optimizer, factor in (
            (theirs, (muon_rate or inner.learning_rate) / inner.learning_rate),
            (adamw, 1),
        ):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
    for place in replica.flat.slices:
        start = place.of(plain.flat.values)
        own, expected = place.of(replica.flat.values) - start, parameters[place.name].detach() - start
        tolerance = 0.02 if is_muons(place.name, place.shape) else 1e-5  # torch iterates in bf16
        assert (own - expected).norm() <= tolerance * expected.norm(), place.name


def test_batches_of_equal_shapes_give_what_single_matrices_give(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Replica(manifest_cut(1, **MUON), 0)
    monkeypatch.setattr(muon, "AT_ONCE", 1)
    apart = Replica(manifest_cut(1, **MUON), 0)
    for step in range(3):
        for replica in (together, apart):
            replica.flat.gradients.copy_(gradients(replica, step))
            replica.inner_step(1)
    assert torch.allclose(together.flat.values, apart.flat.values, atol=1e-6)


def test_a_swarm_of_two_stages_learns_and_goes_on_from_a_snapshot_as_if_nothing_had_been() -> None:
    manifest = manifest_cut(2, **MUON)
    replicas = replicas_of(manifest)
    losses = [train_step(replicas, seed % 3) for seed in range(9)]
    assert losses[-1] < losses[0]
    others = replicas_of(manifest)
    for replica, other in zip(replicas, others, strict=True):
        other.restore(copied_state(replica))
    assert train_step(replicas, 1) == train_step(others, 1)
    train_step(replicas, 2), train_step(others, 2)
    before, after = weights_of(replicas), weights_of(others)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_step_that_runs_out_of_memory_once_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, short = (Replica(manifest_cut(1, **MUON), 0) for _ in range(2))
    failures = iter([MemoryError()])

    def iterated(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        for failure in failures:
            raise failure
        return orthogonalised(matrices, dtype)

    for replica in (calm, short):
        replica.flat.gradients.copy_(gradients(replica, 0))
    calm.inner_step(1)
    monkeypatch.setattr(muon, "orthogonalised", iterated)
    assert short.inner_step(1).left_out == ""
    assert torch.equal(calm.flat.values, short.flat.values)
    assert torch.equal(calm.optimizer.moments[0], short.optimizer.moments[0])


# --- what others see of it ----------------------------------------------------------------------


def of_pieces(entries: slice, size: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr("node.state.transfer.PIECE_PARAMETERS", size)
    places = (within_piece(entries, number) for number in range(pieces))
    return [n * size + i for n, place in enumerate(places) for i in range(place.start, place.stop)]


def test_muons_entries_are_found_in_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    for entries in (slice(0, 0), slice(3, 17), slice(8, 12), slice(0, 40)):
        assert of_pieces(entries, 5, 8, monkeypatch) == list(range(entries.start, entries.stop))


def trained(manifest: Manifest) -> tuple[Replica, slice]:
    replica = Replica(manifest, 0)
    for step in range(20):
        replica.flat.gradients.copy_(gradients(replica, step))
        replica.inner_step(1)
    return replica, muon_range(manifest.inner, replica.flat.slices)


def test_muons_momentum_is_possible_and_what_would_carry_a_newcomer_away_is_not() -> None:
    manifest = manifest_cut(1, **MUON)
    replica, muons = trained(manifest)
    first, second = replica.optimizer.moments
    assert first[muons].any()
    assert not second[muons].any()
    assert are_possible(first, second, manifest.inner, muons)
    assert not are_possible(first, second, manifest.inner)  # AdamW would divide by nothing
    far = first.clone()
    far[muons] *= 1e4
    assert not are_possible(far, second, manifest.inner, muons)
    outside = first.clone()
    outside[-1] = 0.9
    assert not are_possible(outside, second * (second > 1), manifest.inner, muons)


def test_muon_has_the_layers_matrices_side_by_side_and_nothing_else() -> None:
    for stages, stage in ((1, 0), (2, 0), (2, 1), (4, 2)):
        manifest = manifest_cut(stages, **MUON)
        slices = layout(parameter_shapes(manifest, stage))
        muons = muon_range(manifest.inner, slices)
        inside = [p for p in slices if muons.start <= p.start and p.stop <= muons.stop]
        assert {p.name for p in inside} == {p.name for p in slices if is_muons(p.name, p.shape)}
        assert sum(math.prod(p.shape) for p in inside) == muons.stop - muons.start > 0
    adamw = manifest_cut(1)
    assert muon_range(adamw.inner, layout(parameter_shapes(adamw, 0))) == slice(0, 0)


def test_memory_counts_what_a_step_works_with() -> None:
    plain = load_preset("llama-125m")
    manifest = plain.model_copy(update={"inner": plain.inner.model_copy(update={"optimizer": "muon"})})
    slices = layout(parameter_shapes(manifest, 0))
    more = memory_of_state(manifest, 0) - memory_of_state(plain, 0)
    assert more == muon_workspace(manifest.inner, slices) > 4 * 768 * 3072
    assert memory_of_state(plain, 0) == 24 * parameter_count(plain, 0)


# --- the manifest -------------------------------------------------------------------------------


def test_a_manifest_without_muon_says_nothing_of_its_rate_and_refuses_one() -> None:
    assert "muon_learning_rate" not in as_toml(manifest_cut(1))
    assert manifest_cut(1).inner.optimizer == "adamw"
    with pytest.raises(ManifestError, match="muon_learning_rate needs"):
        manifest_cut(1, inner__muon_learning_rate=0.01)
