"""A microbatch in slices gives the same gradients, and the fastest way that fits is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.machine.limits import Room
from node.model.dry_run import DryRun, MemoryMeter
from node.model.execution import (
    USABLE,
    Execution,
    ExecutionMode,
    by_formula,
    choose,
    least_activations,
    modes,
)
from node.model.memory_model import (
    MicrobatchBytes,
    estimated,
    least_in_flight,
    memory_of_buffers,
    most_in_flight,
)
from node.model.replica import Replica
from node.model.resources import GIB
from node.model.stage_work import StageWork
from node.model.transfer import DeviceTransfer, transfer_for
from node.pipeline.incoming import IncomingTensors
from protocol.codecs.codec import encode
from protocol.errors import Refused, ResourceError
from protocol.run.manifest import Manifest, load_preset
from tests.copied_state import copied_state

LARGE = load_preset("llama-125m")


def small(**inner: Any) -> Manifest:
    tiny = load_preset("tiny")
    data = tiny.data.model_copy(update={"sequence_tokens": 16})
    changes = {"sequences": 5, "microbatches": 4} | inner
    return tiny.model_copy(update={"data": data, "inner": tiny.inner.model_copy(update=changes)})


def ring(**inner: Any) -> Manifest:
    """With tied embeddings in two stages: microbatches come back to the first one's head."""
    manifest = small(**inner)
    return manifest.model_copy(update={"model": manifest.model.model_copy(update={"tied_embeddings": True})})


def batch(manifest: Manifest) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens + 1)
    tokens = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


# --- the same result ----------------------------------------------------------------------------


@pytest.mark.parametrize("execution", [Execution(at_once=2), Execution(at_once=1, recomputes=True)])
def test_slices_give_the_same_losses_and_gradients_on_all_stages(execution: Execution) -> None:
    manifest = small()
    found = []
    for way in (Execution(), execution):
        first, last = Replica(manifest, 0), Replica(manifest, 1)
        first.passes.execute(way)
        last.passes.execute(way)
        inputs, labels = batch(manifest)
        leaf, outputs = first.passes.forward(inputs)
        loss, by_inputs = last.passes.last_stage(outputs.detach(), labels)
        assert by_inputs is not None
        assert first.passes.backward(leaf, outputs, by_inputs) is None
        found.append((loss.item(), by_inputs, first.flat.gradients, last.flat.gradients))
    (loss, *whole), (same, *sliced) = found
    assert same == pytest.approx(loss, rel=1e-6)
    for expected, gradient in zip(whole, sliced, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("learns", [True, False])
def test_in_a_ring_the_head_in_slices_gives_the_same(learns: bool) -> None:
    manifest = ring()
    found = []
    for way in (Execution(), Execution(at_once=2)):
        first, last = Replica(manifest, 0), Replica(manifest, 1)
        first.passes.execute(way)
        last.passes.execute(way)
        inputs, labels = batch(manifest)
        leaf, outputs = first.passes.forward(inputs)
        middle, normed = last.passes.forward(outputs.detach())
        loss, by_normed = first.passes.head(normed.detach(), labels, learns)
        by_inputs = last.passes.backward(middle, normed, by_normed)
        assert by_inputs is not None
        first.passes.backward(leaf, outputs, by_inputs)
        found.append((loss, by_normed, by_inputs, first.flat.gradients, last.flat.gradients))
    for expected, sliced in zip(*found, strict=True):
        assert torch.allclose(sliced, expected, rtol=1e-4, atol=1e-7)


def test_slices_keep_nothing_but_the_inputs() -> None:
    manifest = small()
    replica = Replica(manifest, 0)
    replica.passes.execute(Execution(at_once=2))
    work = StageWork(manifest, replica.passes, transfer_for(torch.device("cpu")))
    _, kept, _ = work.forward(*batch(manifest))
    assert kept.numel() == 0
    assert not kept.requires_grad


def test_evaluation_in_slices_is_the_same() -> None:
    manifest = small().model_copy(update={"stages": 1})
    replica = Replica(manifest, 0)
    work = StageWork(manifest, replica.passes, transfer_for(torch.device("cpu")))
    whole = work.evaluate_last(*batch(manifest))
    replica.passes.execute(Execution(at_once=2))
    assert work.evaluate_last(*batch(manifest)) == (pytest.approx(whole[0], rel=1e-6), whole[1])


def test_a_microbatch_of_more_sequences_than_the_run_has_is_refused() -> None:
    """Memory is there for as many as the manifest says."""
    manifest = small()
    stage = Replica(manifest, 1).stage
    incoming = IncomingTensors(manifest, stage, DeviceTransfer(torch.device("cpu")))
    shape = (manifest.inner.sequences + 1, manifest.data.sequence_tokens)
    labels = torch.zeros(shape, dtype=torch.int32)
    request: Any = SimpleNamespace(
        encoded=lambda: [encode(torch.zeros(*shape, 64), "fp32"), encode(labels, "int32")]
    )
    with pytest.raises(Refused, match="at most 5 sequences"):
        incoming.read(request)


# --- which way ----------------------------------------------------------------------------------


def test_first_fewer_in_flight_then_recomputed_then_slices_and_then_none() -> None:
    """What is chosen as the memory shrinks, at a stage that hands on activations."""
    cost_of, allowed = by_formula(LARGE, 0, "fp32"), list(modes(LARGE, 0))
    chosen = [choose(LARGE, 0, allowed, cost_of, int(room * GIB)) for room in (40, 15, 9, 4, 1.7, 0.9, 0.1)]
    assert chosen[-1] is None
    told = [(c.way.recomputes, c.way.at_once, c.in_flight) for c in chosen if c is not None]
    order = [(False, 0, 4), (False, 0, 3)]
    assert told[0] == order[0]
    orders = [(recomputes, at_once > 0) for recomputes, at_once, _ in told]
    assert orders == sorted(orders, key=[(False, False), (True, False), (False, True), (True, True)].index)
    assert len(set(orders)) >= 3
    assert told[-1][1] >= 1


def test_the_last_stage_takes_slices_before_it_recomputes() -> None:
    allowed = list(modes(LARGE, 1))
    assert [way.at_once for way in allowed[:5]] == [0, 4, 3, 2, 1]
    assert [way.recomputes for way in allowed] == [False] * 5 + [True] * 5


def test_what_a_volunteer_fixed_is_kept() -> None:
    assert all(way.recomputes for way in modes(LARGE, 0, "on"))
    assert not any(way.recomputes for way in modes(LARGE, 1, "off"))
    assert all(way.at_once == 0 for way in modes(LARGE, 0, "off")), "a slice is computed twice"


def test_the_least_memory_is_just_enough_for_some_way() -> None:
    for stage in (0, 1):
        least = least_activations(LARGE, stage)
        cost_of = by_formula(LARGE, stage, "fp32")
        assert choose(LARGE, stage, list(modes(LARGE, stage)), cost_of, least + 16) is not None
        assert choose(LARGE, stage, list(modes(LARGE, stage)), cost_of, int(least * 0.99)) is None


def test_never_more_in_flight_than_fit() -> None:
    cost, way = MicrobatchBytes(kept=10, peak=50), ExecutionMode(False, 0, 1)
    for room in range(70, 200, 7):
        choice = choose(LARGE, 0, [way], lambda _: cost, room)
        assert choice is not None
        assert cost.of(choice.in_flight) <= room * USABLE
        assert choice.in_flight <= most_in_flight(LARGE, 0)


# --- measured -----------------------------------------------------------------------------------


class Told(MemoryMeter):
    """A device of which a test says what each pass takes: `of(execution, sequences)` bytes, a fifth of it kept."""

    def __init__(self, replica: Replica, bytes_of: Any) -> None:
        self.replica, self.bytes_of, self.seen = replica, bytes_of, list[Execution]()

    def begin(self) -> None:
        self.seen.append(self.replica.passes.execution)

    def held(self) -> int:
        return self.peak() // 5

    def peak(self) -> int:
        return int(self.bytes_of(self.replica.passes.execution, self.sequences))

    sequences = 0


def dry_run_with(
    manifest: Manifest, stage: int, room: int, per_sequence: int = 2**20
) -> tuple[DryRun, Replica]:
    """A device on which a sequence takes `per_sequence` bytes, a third of it when recomputed."""
    replica = Replica(manifest, stage)

    def bytes_of(execution: Execution, sequences: int) -> int:
        together = min(sequences, execution.at_once or sequences)
        return together * (per_sequence // 3 if execution.recomputes else per_sequence)

    meter = Told(replica, bytes_of)
    work = StageWork(manifest, replica.passes, transfer_for(torch.device("cpu")))
    counting = CountingWork(work, meter)
    later = memory_of_buffers(manifest, stage).total
    made: Any = counting
    return DryRun(replica, made, meter, lambda: Room(room + later, 8 * GIB, "--max-memory"), "fp32"), replica


class CountingWork:
    """Tells the meter how many sequences a pass has."""

    def __init__(self, work: StageWork, meter: Told) -> None:
        self._work, self._meter, self.heads = work, meter, 0

    def forward(self, inputs: Any, labels: Any) -> Any:
        self._meter.sequences = len(labels)
        return self._work.forward(inputs, labels)

    def last_stage(self, inputs: Any, labels: Any, *rest: Any) -> Any:
        self._meter.sequences = len(labels)
        return self._work.last_stage(inputs, labels, *rest)

    def head(self, inputs: Any, labels: Any, learns: bool) -> Any:
        self.heads += 1
        return self._work.head(inputs, labels, learns)

    def backward(self, *arguments: Any) -> Any:
        return self._work.backward(*arguments)


MIB = 2**20


@pytest.mark.parametrize(
    ("room_mib", "expected"),
    [
        (100, Execution(in_flight=4)),
        (9, Execution(in_flight=3)),
        (6, Execution(in_flight=4, recomputes=True)),
        (2, Execution(in_flight=4, at_once=1)),
    ],
)
def test_what_was_measured_decides(room_mib: float, expected: Execution) -> None:
    trial, replica = dry_run_with(small(), 0, int(room_mib * MIB))
    found = trial.run("auto", compiles=False)
    assert found.execution == replica.passes.execution == expected
    assert found.cost.of(expected.in_flight) <= room_mib * MIB * USABLE


def test_the_last_stage_starts_with_smaller_microbatches() -> None:
    trial, _ = dry_run_with(small(), 1, int(4.5 * MIB))
    assert trial.run("auto", compiles=False).execution == Execution(at_once=3)


@pytest.mark.parametrize("stage", [0, 1])
def test_in_a_ring_the_first_stage_rehearses_the_head_and_no_stage_a_loss_at_the_end(stage: int) -> None:
    trial, _ = dry_run_with(ring(), stage, 100 * MIB)
    found = trial.run("auto", compiles=False)
    work: Any = trial._work
    assert bool(work.heads) == (stage == 0)
    assert found.cost.kept > 0, "microbatches are in flight at both"
    assert found.execution == Execution(in_flight=4)


@pytest.mark.parametrize("manifest", [small(), ring()])
def test_a_dry_step_leaves_the_replica_as_it_was(manifest: Manifest) -> None:
    trial, replica = dry_run_with(manifest, 0, 100 * MIB)
    before = copied_state(replica)
    trial.run("auto", compiles=False)
    after = copied_state(replica)
    for name in ("phi", "theta", "delta", "first_moment", "second_moment"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    assert not replica.flat.gradients.any()
    assert (after.step, after.round) == (0, 0)
    trained, fresh = (one.inner_step(1) for one in (replica, Replica(manifest, 0)))
    assert trained == fresh


def test_a_whole_microbatch_that_takes_more_than_two_sequences_promised_is_not_kept() -> None:
    manifest = small()
    trial, _ = dry_run_with(manifest, 1, 6 * MIB)
    meter: Any = trial._meter
    honest = meter.bytes_of
    meter.bytes_of = lambda execution, sequences: (
        honest(execution, sequences) * (1 if sequences < 5 or execution.at_once else 3)
    )
    assert trial.run("auto", compiles=False).execution.at_once > 0


def test_running_out_of_memory_in_the_dry_step_is_no_death() -> None:
    trial, replica = dry_run_with(small(), 1, 100 * MIB)
    work: Any = trial._work
    compute = work.last_stage

    def failing(inputs: Any, labels: Any) -> Any:
        if len(labels) == 5 and not replica.passes.execution.at_once:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return compute(inputs, labels)

    work.last_stage = failing
    assert trial.run("auto", compiles=False).execution.at_once == 3


def test_where_nothing_fits_the_refusal_says_what_is_needed_and_what_the_limit_is() -> None:
    trial, _ = dry_run_with(small(), 0, 100_000)
    with pytest.raises(ResourceError) as refusal:
        trial.run("auto", compiles=False)
    words = str(refusal.value)
    assert "Stage 0 of run 'tiny' needs" in words
    assert "of the 8.0 GiB that --max-memory allows" in words
    assert "A limit of 8." in words
    assert "Stage 1" in words or "Stage 0 is the smallest" in words


def test_least_in_flight_keeps_all_stages_busy() -> None:
    assert least_in_flight(LARGE, 0) == 3


def test_in_a_ring_one_hop_more_is_in_flight_and_the_first_stage_takes_memory_for_logits() -> None:
    tied = ring()
    assert [least_in_flight(tied, stage) for stage in (0, 1)] == [4, 3]
    assert most_in_flight(tied, 1) == most_in_flight(tied, 0) == 4
    plain, sequences = small(), tied.inner.sequences
    wide = {"vocab_size": 100_000}
    plain, tied = (
        manifest.model_copy(update={"model": manifest.model.model_copy(update=wide)})
        for manifest in (plain, tied)
    )
    logits = sequences * plain.data.sequence_tokens * 100_000 * 4
    first, last = (estimated(tied, stage, sequences, recomputes=False) for stage in (0, 1))
    assert first.peak > estimated(plain, 0, sequences, recomputes=False).peak + 0.9 * logits
    assert last.peak < logits < estimated(plain, 1, sequences, recomputes=False).peak
    assert memory_of_buffers(tied, 0).messages > memory_of_buffers(plain, 0).messages
