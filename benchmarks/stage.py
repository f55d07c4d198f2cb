"""Microbatches of each stage, against a loop tuned by hand and against logits that exist whole.

For each stage of a small model with a large vocabulary: forward and backward as a node computes them, against the
tuned loop of pipelines/tuned.py on the same layers (`stage0_vs_tuned`, …, its time by ours), and the layers alone
against transformers' own model of as many (`layers0_vs_transformers`, …). The last stage also
against plain autograd over whole logits: `last_stage_vs_plain` is that one's time by ours, `last_stage_memory` its
peak of memory by ours. Above 1 ours is better. The fastest of the repeats counts, which take turns; on a processor by
its own time, which other programs do not lengthen. On GPUs both compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from pipelines.tuned import Tuned
from reporting.report import Report, arguments_of, parser_of, run
from transformers import AutoConfig, AutoModel

from bootstrap.export.model_config import config_of
from node.model.compiling import Compiling
from node.model.dry_run import meter_of
from node.model.execution import Execution, choose_precision
from node.model.replica import Replica
from protocol.run.manifest import Manifest, load_preset, manifest_from

Microbatch = Callable[[], object]


def manifest_of(preset: str, stages: int, changes: dict[str, int]) -> Manifest:
    """The preset cut into so many stages; `changes` that are not 0 go to its model, `tokens` and `sequences`."""
    settings: dict[str, Any] = load_preset(preset).model_dump()
    settings["stages"] = stages
    for name, value in changes.items():
        if value:
            section = {"sequence_tokens": "data", "sequences": "inner"}.get(name, "model")
            settings[section][name] = value
    return manifest_from(settings)


def inputs_of(manifest: Manifest, stage: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens)
    generator = torch.Generator().manual_seed(stage)
    labels = torch.randint(0, manifest.model.vocab_size, shape, generator=generator).to(device)
    if stage == 0:
        return labels, labels
    return torch.randn(*shape, manifest.model.hidden_size, generator=generator).to(device), labels


def ours(replica: Replica, inputs: torch.Tensor, labels: torch.Tensor) -> Microbatch:
    passes, ones = replica.passes, torch.ones(*labels.shape, replica.manifest.model.hidden_size)

    def microbatch() -> None:
        if replica.stage.index == replica.manifest.hops - 1:
            passes.last_stage(inputs, labels)
            return
        leaf, outputs = passes.forward(inputs)
        passes.backward(leaf, outputs, ones)

    return microbatch


def plainly(replica: Replica, inputs: torch.Tensor, labels: torch.Tensor) -> Microbatch:
    """Autograd over float32 weights and whole logits, under autocast where the precision is bf16."""

    def microbatch() -> None:
        leaf = inputs if replica.stage.is_first else inputs.detach().requires_grad_()
        with replica.passes.execution.autocast(replica.device):
            logits = replica.stage(leaf)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        assert bool(loss.isfinite())
        loss.backward()

    return microbatch


def layers(replica: Replica, inputs: torch.Tensor) -> Microbatch:
    """The stage without its head, there and back: embedding and layers, on the last stage the final norm."""
    stage = replica.stage
    return _there_and_back(stage.body, stage.parameters(), inputs, stage.is_first)


def transformers_layers(replica: Replica, inputs: torch.Tensor) -> Microbatch:
    """The same by transformers' own model of as many layers, which always has both the embedding and the norm."""
    manifest, stage = replica.manifest, replica.stage
    config = AutoConfig.for_model(**config_of(manifest))
    config.num_hidden_layers = len(stage.layers)
    config.vocab_size = manifest.model.vocab_size if stage.is_first else 2  # one that nobody uses
    model = AutoModel.from_config(config, attn_implementation="sdpa").to(replica.device)
    name = "input_ids" if stage.is_first else "inputs_embeds"

    def body(given: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model(**{name: given}, use_cache=False).last_hidden_state
        return hidden

    return _there_and_back(body, model.parameters(), inputs, stage.is_first)


def _there_and_back(
    body: Callable[[torch.Tensor], torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    inputs: torch.Tensor,
    is_first: bool,
) -> Microbatch:
    kept = list(parameters)
    for parameter in kept:
        parameter.grad = torch.zeros_like(parameter)

    def microbatch() -> None:
        hidden = body(inputs if is_first else inputs.detach().requires_grad_())
        hidden.backward(torch.ones_like(hidden))

    return microbatch


def seconds_of(works: dict[str, Microbatch], repeats: int, device: torch.device) -> dict[str, float]:
    """The fastest of each, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(1 + repeats):
        for name, work in works.items():
            began = clock()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(clock() - began)
    return {name: min(taken[1:]) for name, taken in times.items()}


def peak_of(work: Microbatch, device: torch.device) -> int:
    """Bytes, of a microbatch that is not the first."""
    work()
    meter = meter_of(device)
    meter.begin()
    work()
    return meter.peak()


def measure(
    manifest: Manifest, stage: int, device: torch.device, compiles: bool, repeats: int
) -> dict[str, Any]:
    replica = Replica(manifest, stage, str(device))
    inputs, labels = inputs_of(manifest, stage, device)
    is_last = stage == manifest.hops - 1
    works: dict[str, Microbatch] = {}
    row: dict[str, Any] = {"stage": stage}
    if is_last:
        works["plain"] = plainly(replica, inputs, labels)
        row["plain_peak_MiB"] = peak_of(works["plain"], device) / 2**20
        row |= {"plain_ms": 1000 * seconds_of(works, repeats, device)["plain"]}
    replica.passes.compiling = Compiling(room=lambda: int(device.type == "cuda"))
    replica.passes.execute(Execution(choose_precision(device, "auto"), compiles=compiles))
    works = {"ours": ours(replica, inputs, labels)}
    with replica.passes.making_code():
        works["ours"]()
    row["ours_peak_MiB"] = peak_of(works["ours"], device) / 2**20
    tuned = Tuned(manifest, stage, device, compiles)
    works["tuned"] = lambda: tuned.microbatch(inputs, labels)
    if is_last and replica.passes.execution.precision == "fp32":
        works["plain"] = plainly(replica, inputs, labels)
    row |= {f"{name}_ms": 1000 * taken for name, taken in seconds_of(works, repeats, device).items()}
    replica = Replica(manifest, stage, str(device))  # whose gradients are its own
    works = {"layers": layers(replica, inputs), "transformers": transformers_layers(replica, inputs)}
    return row | {f"{name}_ms": 1000 * taken for name, taken in seconds_of(works, repeats, device).items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--compile", choices=("on", "off"), help="default: on for GPUs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    for name, value in {"vocab-size": 128_002, "hidden-size": 256, "heads": 4, "intermediate-size": 704,
                        "layers": 4, "sequences": 4, "sequence-tokens": 512}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help="0: the preset's")
    arguments = arguments_of(
        parser, vocab_size=2050, hidden_size=64, sequences=2, sequence_tokens=64, repeats=1
    )
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    changes = (
        "vocab_size",
        "hidden_size",
        "heads",
        "intermediate_size",
        "layers",
        "sequences",
        "sequence_tokens",
    )
    manifest = manifest_of(
        arguments.preset, arguments.stages, {name: getattr(arguments, name) for name in changes}
    )
    compiles = (arguments.compile or ("on" if device.type == "cuda" else "off")) == "on"
    report, rows, ratios = Report("stage", arguments.json), [], {}
    for stage in range(manifest.stages):
        row = measure(manifest, stage, device, compiles, arguments.repeats)
        report.tell_row({name: round(value, 1) for name, value in row.items()})
        rows.append(row)
        ratios[f"stage{stage}_vs_tuned"] = round(row["tuned_ms"] / row["ours_ms"], 3)
        ratios[f"layers{stage}_vs_transformers"] = round(row["transformers_ms"] / row["layers_ms"], 3)
    last = rows[-1]
    ratios["last_stage_vs_plain"] = round(last["plain_ms"] / last["ours_ms"], 3)
    ratios["last_stage_memory"] = round(last["plain_peak_MiB"] / max(0.1, last["ours_peak_MiB"]), 2)
    report.conclude(ratios, rows, f"fastest of {arguments.repeats}")


if __name__ == "__main__":
    run(main)
