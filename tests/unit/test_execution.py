"""How a stage is computed: other ways to the same gradients, and the choice between them."""

from __future__ import annotations

import pytest
import torch

from node.model.execution import (
    USABLE,
    USABLE_OF_GPU,
    Execution,
    by_formula,
    choose,
    choose_execution,
    described,
    modes,
)
from node.model.memory_model import estimated, least_in_flight, memory_of_buffers, memory_of_state
from node.model.replica import Replica
from node.model.resources import GIB
from protocol.errors import UserError
from protocol.run.manifest import Manifest, load_preset

CPU = torch.device("cpu")
LARGE = load_preset("llama-1.3b")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_preset("tiny").model_copy(update={"stages": 1})


def gradients_of(manifest: Manifest, execution: Execution) -> tuple[float, torch.Tensor]:
    torch.manual_seed(3)
    replica = Replica(manifest, 0)
    replica.passes.execute(execution)
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    loss, _ = replica.passes.last_stage(tokens[:, :-1], tokens[:, 1:])
    return loss.item(), replica.flat.gradients.clone()


def test_recomputed_activations_give_the_same_gradients(manifest: Manifest) -> None:
    loss, gradients = gradients_of(manifest, Execution())
    again, recomputed = gradients_of(manifest, Execution(recomputes=True))
    assert again == loss
    assert torch.allclose(recomputed, gradients, rtol=1e-5, atol=1e-8)


def test_without_a_compiler_a_volunteer_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="apt-get install"):
        choose_execution(LARGE, 1, CPU, 1000 * GIB, compile="on")


def test_recomputation_keeps_less(manifest: Manifest) -> None:
    """Of what autograd saves: counted, not estimated."""

    def kept(execution: Execution) -> int:
        replica, total = Replica(manifest, 0), 0
        replica.passes.execute(execution)

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            replica.passes.forward(torch.zeros(4, 128, dtype=torch.long))
        return total

    assert kept(Execution(recomputes=True)) < kept(Execution()) / 4


def test_bf16_computes_nearly_the_same_with_float32_weights_and_gradients(manifest: Manifest) -> None:
    loss, gradients = gradients_of(manifest, Execution())
    rounded, coarse = gradients_of(manifest, Execution(precision="bf16"))
    assert rounded == pytest.approx(loss, abs=0.02)
    assert coarse.dtype == torch.float32
    assert not torch.equal(coarse, gradients)
    similarity = torch.nn.functional.cosine_similarity(coarse, gradients, dim=0)
    assert float(similarity) > 0.99


def test_a_stage_in_bf16_hands_on_activations_and_takes_gradients(manifest: Manifest) -> None:
    two = manifest.model_copy(update={"stages": 2})
    first, second = Replica(two, 0), Replica(two, 1)
    for replica in (first, second):
        replica.passes.execute(Execution(precision="bf16", recomputes=True))
    tokens = torch.randint(0, 256, (2, 17))
    leaf, outputs = first.passes.forward(tokens[:, :-1])
    _, by_inputs = second.passes.last_stage(outputs.detach().float(), tokens[:, 1:])
    assert by_inputs is not None
    first.passes.backward(leaf, outputs, by_inputs)
    assert float(first.flat.gradients.abs().max()) > 0


def room_for(activations: int) -> int:
    """Free bytes of which `activations` are left for them at stage 0, and some that rounding takes."""
    beside = memory_of_state(LARGE, 0) + memory_of_buffers(LARGE, 0).total
    return beside + int(activations / USABLE) + 8


def test_auto_recomputes_only_what_does_not_fit() -> None:
    least, sequences = least_in_flight(LARGE, 0), LARGE.inner.sequences
    kept = estimated(LARGE, 0, sequences, recomputes=False).of(least)
    again = estimated(LARGE, 0, sequences, recomputes=True).of(least)
    roomy, tight = (choose_execution(LARGE, 0, CPU, room_for(room)) for room in (2 * kept, again))
    assert (roomy.recomputes, tight.recomputes, tight.at_once) == (False, True, 0)
    assert not choose_execution(LARGE, 0, CPU, room_for(0), recompute="off").recomputes
    assert choose_execution(LARGE, 0, CPU, 1000 * GIB, recompute="on").recomputes
    assert again < kept / 4


def test_as_many_microbatches_are_in_flight_as_fit_and_as_keep_the_stages_busy() -> None:
    least, cost = least_in_flight(LARGE, 0), estimated(LARGE, 0, LARGE.inner.sequences, recomputes=False)
    assert least == 2 * (LARGE.stages - 1) + 1
    for count in (least + 1, LARGE.inner.microbatches):
        chosen = choose_execution(LARGE, 0, CPU, room_for(cost.of(count)))
        assert (chosen.in_flight, chosen.recomputes) == (count, False)
    assert choose_execution(LARGE, 0, CPU, 1000 * GIB).in_flight == LARGE.inner.microbatches
    assert choose_execution(LARGE, LARGE.stages - 1, CPU, 1000 * GIB).in_flight == 1
    sparing = choose_execution(LARGE, 0, CPU, 0)
    assert (sparing.in_flight, sparing.at_once, sparing.recomputes) == (1, 1, True)


def test_a_volunteer_is_told_when_few_microbatches_fit() -> None:
    chosen = Execution(in_flight=5)
    assert "at most 5 microbatches in flight" in described(chosen, LARGE, 0)
    sliced = described(Execution(at_once=2), LARGE, LARGE.stages - 1)
    assert f"a microbatch of {LARGE.inner.sequences} sequences 2 at a time" in sliced


def test_auto_stays_with_float32_where_bf16_is_not_faster() -> None:
    assert choose_execution(LARGE, 1, CPU, 1000 * GIB).precision == "fp32"
    assert choose_execution(LARGE, 1, CPU, 1000 * GIB, precision="bf16").precision == "bf16"


def test_a_gpu_without_bf16_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match="--precision fp32"):
        choose_execution(LARGE, 1, torch.device("cuda"), 1000 * GIB, precision="bf16")


# --- on a GPU, by its numbers -------------------------------------------------------------------

H100 = int(79.1 * GIB)  # free on an 80 GB card before a program computes on it


def on_h100(preset: str, stages: int, stage: int, free: int = H100) -> Execution:
    manifest = load_preset(preset).model_copy(update={"stages": stages})
    return choose_execution(manifest, stage, torch.device("cuda:0"), free, "bf16")


@pytest.fixture
def bf16_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("machine.accelerator", "model.execution"):
        monkeypatch.setattr(f"node.{module}.has_bf16", lambda _: True)


@pytest.mark.usefixtures("bf16_everywhere")
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("preset", ["llama-125m", "llama-1.3b"])
def test_a_whole_microbatch_is_computed_at_once_where_it_fits(preset: str, stages: int) -> None:
    """2.1 billion parameters in one stage take 48 GiB with their gradients and momenta, and leave room enough."""
    for stage in range(stages):
        chosen = on_h100(preset, stages, stage)
        assert (chosen.recomputes, chosen.at_once) == (False, 0)


@pytest.mark.usefixtures("bf16_everywhere")
def test_what_fits_is_asked_for_before_the_replica_is_made() -> None:
    """Afterwards its weights and momenta would be subtracted twice."""
    manifest = load_preset("llama-1.3b").model_copy(update={"stages": 1})
    chosen = on_h100("llama-1.3b", 1, 0, free=H100 - memory_of_state(manifest, 0))
    assert chosen.recomputes


@pytest.mark.usefixtures("bf16_everywhere")
def test_a_part_of_a_gpu_is_no_reason_to_recompute_when_it_is_enough() -> None:
    for stage in range(4):
        chosen = on_h100("llama-125m", 4, stage, free=H100 // 3)
        assert (chosen.recomputes, chosen.at_once) == (False, 0)


def test_a_large_gpu_takes_the_whole_microbatch_of_a_whole_model_without_computing_it_twice() -> None:
    """By formula, with bf16 copies and a chunk of logits counted: 1.3 billion parameters on 80 GB."""
    whole = LARGE.model_copy(update={"stages": 1})
    room = 79 * 10**9 - memory_of_state(whole, 0, "bf16")
    chosen = choose(whole, 0, list(modes(whole, 0)), by_formula(whole, 0, "bf16"), room, USABLE_OF_GPU)
    assert chosen is not None
    assert (chosen.way.recomputes, chosen.way.at_once) == (False, 0)
