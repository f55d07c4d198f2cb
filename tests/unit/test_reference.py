"""docs/reference.py computes what the daemon does: microbatches, inner steps and a pair's round, to 1e-6."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from node.model.inner import learning_rate
from node.model.replica import Replica
from tests.swarm.micro import micro_manifest

FILE = Path(__file__).parents[2] / "docs" / "reference.py"
LEAST_DIFFERENCE = 1e-6
MICROBATCHES, STEPS, ROUNDS = 2, 3, 2


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_fits_on_a_few_screens() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 150


def weights_of(replica: Replica, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {place.name: place.of(flat).clone() for place in replica.flat.slices}


def difference(theirs: dict[str, torch.Tensor], replica: Replica, flat: torch.Tensor) -> float:
    ours = weights_of(replica, flat)
    assert theirs.keys() == ours.keys()
    return max(float((theirs[name].detach() - ours[name]).abs().max()) for name in ours)


def train_daemon_on(tokens: torch.Tensor, labels: torch.Tensor, first: Replica, last: Replica) -> float:
    leaf, outputs = first.passes.forward(tokens)
    loss, by_inputs = last.passes.last_stage(outputs.detach(), labels)
    assert by_inputs is not None
    first.passes.backward(leaf, outputs, by_inputs)
    return float(loss)


def test_two_rounds_of_a_pair_are_the_daemons(reference: ModuleType) -> None:
    manifest = micro_manifest(
        inner__microbatches=MICROBATCHES,
        inner__beta2=reference.BETA2,
        inner__weight_decay=reference.DECAY,
        inner__eps=reference.ADAM_EPS,
    )
    inner, generator = manifest.inner, torch.Generator().manual_seed(0)
    assert (inner.beta1, inner.eps, inner.weight_decay, inner.clip_norm) == (
        reference.BETA1,
        reference.ADAM_EPS,
        reference.DECAY,
        reference.CLIP,
    )
    assert manifest.outer.coefficients == (reference.ALPHA, reference.BETA, reference.GAMMA)
    assert (manifest.model.heads, manifest.model.norm_eps, manifest.model.rope_theta) == (
        reference.HEADS,
        reference.EPS,
        reference.ROPE_THETA,
    )
    replicas = [[Replica(manifest, stage) for _ in range(2)] for stage in range(2)]  # [stage][replica]
    phis = [[weights_of(one, one.phi) for one in pair] for pair in replicas]
    thetas = [[{n: w.clone().requires_grad_() for n, w in phi.items()} for phi in pair] for pair in phis]
    deltas = [[{n: torch.zeros_like(w) for n, w in phi.items()} for phi in pair] for pair in phis]
    moments: list[list[dict[str, list[torch.Tensor]]]] = [[{}, {}], [{}, {}]]
    for step in range(ROUNDS * STEPS):
        for replica in range(2):
            for _ in range(MICROBATCHES):
                shape = (inner.sequences, manifest.data.sequence_tokens + 1)
                rows = torch.randint(manifest.model.vocab_size, shape, generator=generator)
                batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
                here = reference.train_on(*batch, thetas[0][replica], thetas[1][replica])
                there = train_daemon_on(*batch, replicas[0][replica], replicas[1][replica])
                assert here == pytest.approx(there, abs=LEAST_DIFFERENCE)
            for stage in range(2):
                own, rate = replicas[stage][replica], learning_rate(inner, step)
                reference.inner_step(
                    thetas[stage][replica], moments[stage][replica], rate, MICROBATCHES, step + 1
                )
                own.inner_step(MICROBATCHES)
                assert difference(thetas[stage][replica], own, own.flat.values) < LEAST_DIFFERENCE
        if (step + 1) % STEPS == 0:
            for stage, pair in enumerate(replicas):
                reference.outer_step(thetas[stage], phis[stage], deltas[stage])
                mean_z = (pair[0].whole.contribution() + pair[1].whole.contribution()) / 2
                for replica, own in enumerate(pair):
                    own.finish_round(mean_z)
                    assert difference(phis[stage][replica], own, own.phi) < LEAST_DIFFERENCE
                    assert difference(deltas[stage][replica], own, own.delta) < LEAST_DIFFERENCE
