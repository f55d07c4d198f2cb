"""Before the weights of a checkpoint are there a replica is measured, and has nothing that nobody has set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from node.model.dry_run import DryRun, blank_weights
from node.model.execution import Execution, modes
from node.model.replica import Replica
from protocol.errors import NonFinite, Refused
from protocol.run.manifest import Manifest
from protocol.run.start import Start
from tests.unit.test_fitting import MIB, dry_run_with, ring, small
from tests.unset_memory import unset_memory_is_nan

# as test_fitting.py has it: for whole microbatches, for recomputing, for slices
ROOMS = (100, 6, 2)


@pytest.fixture(autouse=True)
def _nan() -> Iterator[None]:
    with unset_memory_is_nan():
        yield


def from_checkpoint(manifest: Manifest, **changes: Any) -> Manifest:
    start = Start(name="model", digests=("0" * 64,) * manifest.stages)
    return manifest.model_copy(update={"start": start} | changes)


def found(
    manifest: Manifest, stage: int, room_mib: int, recompute: str = "auto"
) -> tuple[Replica, Execution]:
    trial, replica = dry_run_with(manifest, stage, room_mib * MIB)
    return replica, trial.run(recompute, compiles=False).execution


def assert_untouched(replica: Replica) -> None:
    fresh = Replica(replica.manifest, replica.stage.index)
    for name, tensor in fresh.state().tensors().items():
        assert torch.equal(replica.state().tensors()[name], tensor), name
    assert not replica.flat.gradients.any()
    assert "0 sequences" in repr(replica.passes.probes)
    assert not replica.passes.has_run


@pytest.mark.parametrize("made", [small, ring])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stage", [0, 1])
def test_each_way_to_compute_is_measured_without_weights(made: Any, optimizer: str, stage: int) -> None:
    muon = {} if optimizer == "muon" else {"muon_learning_rate": None}
    manifest = from_checkpoint(made(optimizer=optimizer, **muon))
    chosen = {
        (recompute, room): found(manifest, stage, room, recompute)
        for recompute, room in [*(("auto", room) for room in ROOMS), ("on", 100), ("off", 100)]
    }
    for replica, _ in chosen.values():
        assert replica.is_finite()
        assert_untouched(replica)
    ways = {recompute: execution for (recompute, _), (_, execution) in chosen.items()}
    assert (ways["on"].recomputes, ways["off"].recomputes) == (True, False)
    assert len({execution for _, execution in chosen.values()}) >= 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_no_mode_gives_a_value_that_is_not_finite(precision: Any, stage: int) -> None:
    manifest = from_checkpoint(ring())
    trial, replica = dry_run_with(manifest, stage, 100 * MIB)
    with blank_weights(replica):
        for way in modes(manifest, stage):
            replica.passes.execute(Execution(precision, way.recomputes, at_once=way.at_once))
            trial._pass(manifest.inner.sequences)  # raises it
    assert_untouched(replica)


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "eden4", "eden2"])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_encoded_in_the_dry_run_fits_each_codec(codec: str, stage: int) -> None:
    manifest = small()
    wire = manifest.wire.model_copy(update={"activations": codec, "gradients": codec})
    replica, execution = found(from_checkpoint(manifest, wire=wire), stage, 100)
    assert execution.at_once == 0
    assert_untouched(replica)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_from_the_seed_come_back_after_it(stage: int) -> None:
    manifest = small()
    wild = manifest.model_copy(update={"model": manifest.model.model_copy(update={"init_std": 1e30})})
    replica, _ = found(wild, stage, 100)  # whose loss is infinite
    assert_untouched(replica)
    assert replica.flat.values.abs().max() > 1e30


def test_a_value_that_is_not_finite_ends_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a device that computes nonsense: the training says so, where peers and volunteer hear of it."""

    def broken(self: DryRun, sequences: int) -> None:
        raise NonFinite("the loss")

    expected = [found(small(), stage, 100)[1] for stage in (0, 1)]
    monkeypatch.setattr(DryRun, "_pass", broken)
    assert [found(small(), stage, 100)[1] for stage in (0, 1)] == expected


def test_nobody_gets_weights_that_are_not_there() -> None:
    replica = Replica(from_checkpoint(small()), 1)
    with pytest.raises(Refused, match="no-weights"):
        replica.read_piece(0, moments=False)
    weights = {place.name: torch.ones(place.shape) for place in replica.flat.slices}
    replica.begin_with(weights.items())
    assert replica.read_piece(0, moments=False)[0].eq(1).all()
