"""A run that a founder's machines can train in the time that there is: its size, stages and steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bootstrap.checking.costs import Cost, cost_of, step_time
from bootstrap.checking.fitting import is_fit
from bootstrap.checking.report import AssumedLinks
from node.machine.devices import Device
from protocol.run.manifest import BYTES, PRESETS, Manifest, load_preset, manifest_from

HOME = AssumedLinks.between(2.5e6, 12.5e6, 0.05)  # 20 Mbit/s up and 100 down: what homes have at least
BYTE_VALUES = 256
SMALLEST_VOCABULARY = 1_024  # that is worth training, where the preset is for bytes
# tokens to a parameter: what a model of its size needs for the least loss by compute (arXiv 2203.15556), and those
# after which more of them bring little
ENOUGH, MOST = 20, 400
LEAST_STEPS = 100
CLIP = 1.5  # of a run that strangers may join, whose partners are not trusted: docs/defence.md


@dataclass(frozen=True)
class Wishes:
    """What a founder knows. `text` is as of --data; `tokenizer` is "own", "bytes" or where its file is."""

    name: str
    text: str
    tokenizer: str
    is_private: bool
    machines: int
    device: Device  # of each
    hours: float


@dataclass(frozen=True)
class Proposal:
    preset: str
    manifest: Manifest
    replicas: int  # of each stage
    cost: Cost

    @property
    def is_enough(self) -> bool:
        """True if the model sees as much text as a model of its size needs."""
        return self.cost.tokens >= ENOUGH * parameters_of(self.manifest)


def proposals(wishes: Wishes, vocabulary: int | None = None) -> list[Proposal]:
    """Return one for each preset that the machines can train, the smallest first; none where nothing fits.

    `vocabulary` is of a tokenizer that there is.
    """
    found = (_proposal(wishes, name, vocabulary) for name in PRESETS)
    return [proposal for proposal in found if proposal is not None]


def best(found: list[Proposal]) -> Proposal:
    """Return the largest model that sees enough text in the time, else the smallest."""
    return next((proposal for proposal in reversed(found) if proposal.is_enough), found[0])


def parameters_of(manifest: Manifest) -> int:
    model = manifest.model
    tables = model.table_parameters * (2 - model.tied_embeddings)
    return model.layers * model.layer_parameters + tables


def _proposal(wishes: Wishes, preset: str, vocabulary: int | None) -> Proposal | None:
    base = _base(wishes, preset, vocabulary)
    staged = [(manifest, wishes.machines // manifest.stages) for manifest in _staged(base, wishes.machines)]
    fitting = [(manifest, replicas) for manifest, replicas in staged if is_fit(manifest, wishes.device)]
    if not fitting:
        return None
    rates = {
        manifest.stages: replicas / step_time(manifest, wishes.device, HOME, replicas).whole
        for manifest, replicas in fitting
    }
    # a stage with two replicas goes on without one of them
    manifest, replicas = max(fitting, key=lambda one: (one[1] > 1, rates[one[0].stages]))
    manifest = _with_steps(manifest, _steps(manifest, wishes, replicas))
    cost = cost_of(manifest, wishes.device, HOME, replicas)
    return None if cost is None else Proposal(preset, manifest, replicas, cost)


def _base(wishes: Wishes, preset: str, vocabulary: int | None) -> Manifest:
    contents = load_preset(preset).model_dump()
    contents["name"] = wishes.name
    contents["data"]["source"] = wishes.text if wishes.text == "python-stdlib" else "local"
    contents["access"]["private"] = wishes.is_private
    if not wishes.is_private:
        contents["outer"]["clip"] = contents["outer"]["clip"] or CLIP
    model = contents["model"]
    if wishes.tokenizer == BYTES:
        model["vocab_size"] = BYTE_VALUES
    elif vocabulary is not None:
        model["vocab_size"] = vocabulary
    elif model["vocab_size"] <= BYTE_VALUES:
        model["vocab_size"] = SMALLEST_VOCABULARY
    return manifest_from(contents)


def _staged(base: Manifest, machines: int) -> Iterator[Manifest]:
    """Yield the run in two stages and more, so that only volunteers of the first one need the text."""
    for stages in range(min(2, machines), min(machines, base.model.layers) + 1):
        yield manifest_from(base.model_dump() | {"stages": stages})


def _steps(manifest: Manifest, wishes: Wishes, replicas: int) -> int:
    """Inner steps for the hours, and no more than bring anything; of two digits."""
    by_time = wishes.hours * 3600 / step_time(manifest, wishes.device, HOME, replicas).whole
    tokens = manifest.inner.microbatches * manifest.tokens_per_microbatch * replicas
    steps = max(LEAST_STEPS, min(by_time, MOST * parameters_of(manifest) / tokens))
    return int(float(f"{steps:.2g}"))


def _with_steps(manifest: Manifest, steps: int) -> Manifest:
    contents = manifest.model_dump()
    contents["inner"]["total_steps"] = steps
    contents["inner"]["warmup_steps"] = min(contents["inner"]["warmup_steps"], steps // 10)
    return manifest_from(contents)
