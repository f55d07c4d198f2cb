"""The path that training takes, head in chunks and bf16 working weights, against plain PyTorch over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from node.model import head_loss
from node.model.execution import Execution
from node.model.head_loss import loss_with_gradients, padded, plain_softmax, summed_loss
from node.model.memory_model import Precision
from node.model.passes import Passes
from node.model.replica import Replica, digest_of
from node.model.stage import logits_through
from node.storage.stage_state import StageState
from protocol.errors import NonFinite
from protocol.run.manifest import Manifest
from tests.copied_state import copied_state
from tests.swarm.micro import micro_manifest

VOCABULARY = 259  # not a multiple of anything that kernels like
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"family": "mistral", "kv_heads": 1, "sliding_window": 7},
    "qwen2": {"family": "qwen2", "kv_heads": 1},
    "qwen3": {"family": "qwen3", "kv_heads": 1, "head_dim": 12},
}
STEPS = 30


def manifest_of(stages: int = 1, family: str = "llama", is_tied: bool = False, **changes: Any) -> Manifest:
    settings = {f"model__{name}": value for name, value in FAMILIES[family].items()}
    settings |= {"model__tied_embeddings": is_tied, "model__vocab_size": VOCABULARY, **changes}
    return micro_manifest(stages=stages, **settings)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a microbatch, the last one shorter."""
    monkeypatch.setattr(head_loss, "LEAST_TOKENS", 20)
    monkeypatch.setattr(head_loss, "LOGITS_ON_HOST", 1)


def batch(manifest: Manifest, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The same few texts again and again, which can be learned."""
    shape = (3, manifest.data.sequence_tokens + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed % 2))
    return tokens[:, :-1], tokens[:, 1:]


def replicas_of(manifest: Manifest, execution: Execution) -> list[Replica]:
    replicas = [Replica(manifest, stage) for stage in range(manifest.stages)]
    for replica in replicas:
        replica.passes.execute(execution)
    return replicas


def trained(replicas: list[Replica], tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """One microbatch there and back, as the pipeline does it."""
    *before, last = [replica.passes for replica in replicas]
    is_ring = last.stage.is_ring
    there, hidden = [], tokens
    for passes in [*before, last] if is_ring else before:
        leaf, outputs = passes.forward(hidden)
        there.append((passes, leaf, outputs))
        hidden = outputs.detach()
    if is_ring:
        loss, gradient = before[0].head(hidden, labels, learns=True)
    else:
        loss, gradient = last.last_stage(hidden, labels)
    for passes, leaf, outputs in reversed(there):
        assert gradient is not None
        gradient = passes.backward(leaf, outputs, gradient)
    assert gradient is None  # of tokens
    return loss.item()


def trained_plainly(
    replicas: list[Replica], tokens: torch.Tensor, labels: torch.Tensor, is_bf16: bool
) -> float:
    """The reference: logits whole, float32 weights, autocast for bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
        logits = logits_through([replica.stage for replica in replicas], tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    return loss.item()


def gradients_of(replicas: list[Replica]) -> torch.Tensor:
    return torch.cat([replica.flat.gradients for replica in replicas]).clone()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def reference(manifest: Manifest, is_bf16: bool = False) -> tuple[float, torch.Tensor]:
    plain = replicas_of(manifest, Execution())
    return trained_plainly(plain, *batch(manifest), is_bf16), gradients_of(plain)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_whole_logits(family: str, is_tied: bool, stages: int) -> None:
    manifest = manifest_of(stages, family, is_tied)
    loss, gradients = reference(manifest)
    for execution in (Execution(), Execution(at_once=2), Execution(recomputes=True)):
        replicas = replicas_of(manifest, execution)
        assert trained(replicas, *batch(manifest)) == pytest.approx(loss, rel=1e-5)
        assert distance(gradients_of(replicas), gradients) < 1e-5


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_autocast_over_whole_logits(family: str, is_tied: bool, stages: int) -> None:
    manifest = manifest_of(stages, family, is_tied)
    loss, gradients = reference(manifest)
    rounded, coarse = reference(manifest, is_bf16=True)
    for recomputes in (False, True):
        replicas = replicas_of(manifest, Execution("bf16", recomputes))
        found = trained(replicas, *batch(manifest))
        assert abs(found - loss) <= abs(rounded - loss) + 1e-5
        assert distance(gradients_of(replicas), gradients) <= 1.02 * distance(coarse, gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_thirty_inner_steps_go_down_the_same_way(is_tied: bool, precision: Precision) -> None:
    manifest = manifest_of(2, is_tied=is_tied)

    def losses(execution: Execution | None, is_bf16: bool = False) -> torch.Tensor:
        replicas, found = replicas_of(manifest, execution or Execution()), []
        for step in range(STEPS):
            work = trained(replicas, *batch(manifest, step)) if execution else None
            found.append(trained_plainly(replicas, *batch(manifest, step), is_bf16) if work is None else work)
            for replica in replicas:
                replica.inner_step(1)
        return torch.tensor(found)

    plain, ours = losses(None), losses(Execution(precision))
    assert plain[-1] < plain[0] - 0.9  # there was something to learn
    if precision == "fp32":
        assert torch.allclose(ours, plain, rtol=1e-5)
    else:
        off, autocast = ours - plain, losses(None, is_bf16=True) - plain
        assert off.abs().mean() <= autocast.abs().mean() + 1e-4  # both are rounding, a few 1e-4 of 5 nats


def test_losses_under_the_slow_weights_are_those_of_whole_logits() -> None:
    for is_tied in (False, True):
        manifest = manifest_of(is_tied=is_tied)
        [replica] = replicas_of(manifest, Execution("bf16", at_once=2))
        tokens, labels = batch(manifest)
        logits = replica.passes.evaluate(tokens).flatten(0, 1)
        expected = F.cross_entropy(logits, labels.flatten(), reduction="sum").item()
        assert replica.passes.evaluate_loss(tokens, labels) == pytest.approx(expected, rel=1e-6)


# --- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_the_vocabulary_change_no_loss_and_get_no_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(50, 8, generator=generator), torch.randn(VOCABULARY, 8, generator=generator)
    labels = torch.randint(0, VOCABULARY, (50,), generator=generator)
    wide = torch.full((padded(VOCABULARY), 8), 30.0)  # what stands there must not matter
    wide[:VOCABULARY] = weight
    one = loss_with_gradients(hidden, weight.to(dtype), labels, VOCABULARY)
    other = loss_with_gradients(hidden, wide.to(dtype), labels, VOCABULARY)
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-6)
    assert one.by_weight is not None
    assert other.by_weight is not None
    assert other.by_weight.shape == weight.shape
    assert distance(other.by_weight, one.by_weight) < 1e-4
    assert distance(other.by_hidden, one.by_hidden) < 1e-2
    assert one.by_weight.dtype == torch.float32


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def seen(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(len(logits))
        return plain_softmax(logits, labels)

    hidden, labels = torch.randn(50, 8), torch.zeros(50, dtype=torch.long)
    loss_with_gradients(hidden, torch.randn(VOCABULARY, 8), labels, VOCABULARY, softmax=seen)
    assert rows == [20, 20, 10]


def test_a_token_that_is_nearly_certain_of_the_wrong_one_has_a_finite_loss() -> None:
    """Its probability is nothing in float32, its logarithm is."""
    weight = torch.tensor([[200.0], [-200.0]])
    found = loss_with_gradients(torch.ones(1, 1), weight, torch.tensor([1]), 2)
    assert found.loss.item() == pytest.approx(400.0)
    assert found.by_hidden.item() == pytest.approx(400.0)
    assert summed_loss(torch.ones(1, 1), weight, torch.tensor([1])).item() == pytest.approx(400.0)


def test_torch_2_11_without_a_loss_of_its_own_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name in ((F, "linear_cross_entropy"), (torch.nn, "LinearCrossEntropyLoss")):
        monkeypatch.delattr(holder, name, raising=False)
    manifest = manifest_of()
    loss, gradients = reference(manifest)
    [replica] = replicas_of(manifest, Execution())
    assert trained([replica], *batch(manifest)) == pytest.approx(loss, rel=1e-5)
    assert distance(gradients_of([replica]), gradients) < 1e-5


# --- working weights -----------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def bf16(request: pytest.FixtureRequest) -> Replica:
    [replica] = replicas_of(manifest_of(is_tied=request.param), Execution("bf16"))
    return replica


def loss_of(passes: Passes) -> float:
    manifest = manifest_of()
    loss, _ = passes.last_stage(*batch(manifest))
    return loss.item()


def changed(state: StageState) -> StageState:
    return StageState(**{**vars(state), "theta": state.theta + 0.05, "phi": state.phi + 0.05})


@pytest.mark.parametrize("change", ["inner step", "round", "restore", "piece", "begin"])
def test_whatever_changes_the_weights_the_next_pass_computes_with_them(change: str, bf16: Replica) -> None:
    before = loss_of(bf16.passes)
    if change == "inner step":
        bf16.inner_step(1)
    elif change == "round":
        bf16.phi.add_(0.05)
        bf16.finish_round_alone(bf16.whole)
    elif change == "restore":
        bf16.restore(changed(copied_state(bf16)))
    elif change == "piece":
        bf16.adopt({0: [piece + 0.05 for piece in bf16.read_piece(0, moments=True)]}, 1, 1)
    else:
        bf16.begin_with([(place.name, place.of(bf16.phi) + 0.05) for place in bf16.flat.slices])
    after = loss_of(bf16.passes)
    [same] = replicas_of(bf16.manifest, Execution("bf16"))
    same.restore(copied_state(bf16))
    assert after != before
    assert after == loss_of(same.passes)


def test_nothing_of_the_padding_or_the_casts_leaves_the_stage(bf16: Replica) -> None:
    """Neither pieces for others nor snapshots nor digests differ from those of a stage that never had them."""
    [plain] = replicas_of(bf16.manifest, Execution())
    loss_of(bf16.passes)
    assert bf16.parameters == plain.parameters
    assert bf16.whole.pieces == plain.whole.pieces
    for name, tensor in copied_state(plain).tensors().items():
        same = copied_state(bf16).tensors()[name]
        assert same.dtype == torch.float32
        assert torch.equal(same, tensor)
    pieces = [digest_of(replica.read_piece(0, moments=True)) for replica in (plain, bf16)]
    assert pieces[0] == pieces[1]
    assert torch.equal(bf16.whole.contribution(), plain.whole.contribution())
    logits = [replica.passes.evaluate(batch(plain.manifest)[0]) for replica in (plain, bf16)]
    assert logits[1].shape[-1] == VOCABULARY
    assert torch.equal(*logits)


def test_back_in_float32_the_stage_is_as_it_was(bf16: Replica) -> None:
    loss_of(bf16.passes)
    bf16.forget_gradients()
    bf16.passes.execute(Execution())
    loss, gradients = reference(bf16.manifest)
    assert loss_of(bf16.passes) == pytest.approx(loss, rel=1e-5)
    assert distance(bf16.flat.gradients, gradients) < 1e-5


@pytest.mark.parametrize("at_once", [0, 1])
def test_in_bf16_too_a_loss_that_is_none_leaves_the_gradients_as_they_were(
    at_once: int, bf16: Replica
) -> None:
    bf16.passes.execute(Execution("bf16", at_once=at_once))
    tokens, labels = batch(bf16.manifest)
    loss_of(bf16.passes)
    before = bf16.flat.gradients.clone()
    table = next(place.of(bf16.flat.values) for place in bf16.flat.slices if "embed" in place.name)
    damaged = torch.ones_like(tokens)
    damaged[-1] = 2
    table[2] = float("nan")
    bf16.passes.weights_changed()
    with pytest.raises(NonFinite):
        bf16.passes.last_stage(damaged, labels)
    assert torch.allclose(bf16.flat.gradients, before, atol=1e-6)


class Kernels(TorchDispatchMode):
    """Notes the kernels of attention, and the types of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name() and "backward" not in func.name():
            self.seen.add((func.name(), args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attention_takes_the_fused_kernel_in_the_precision_of_the_stage(precision: torch.dtype) -> None:
    """No mask stands in its way where all earlier tokens are seen."""
    manifest = manifest_of(model__head_dim=16)
    [replica] = replicas_of(manifest, Execution("bf16" if precision == torch.bfloat16 else "fp32"))
    with Kernels() as kernels:
        loss_of(replica.passes)
    assert kernels.seen == {("aten::_scaled_dot_product_flash_attention_for_cpu", precision)}
