"""Whether a swarm learns tied embeddings: its loss against plain PyTorch's after the same tokens, tied and untied.

The tiny preset, 400 inner steps of two microbatches of two sequences on each of 2 replicas a stage, 409,600 tokens.
The swarms are the daemon's own code in one process under virtual time; tied embeddings in several stages go around a
ring. The plain loop is transformers' model with torch's AdamW on the same weights to begin with, the same schedule,
and in each step as many sequences as all replicas have. Losses are on 512 held-out sequences, means over the seeds.
"""

from __future__ import annotations

from itertools import islice
from statistics import fmean

import torch
import torch.nn.functional as F
from pipelines.published import tiny_with_adamw
from reporting.report import Report, arguments_of, parser_of, run
from transformers import AutoConfig, AutoModelForCausalLM

from bootstrap.export.model_config import config_of
from bootstrap.lab.simulation.learning import simulate, text_of
from bootstrap.lab.simulation.study import one_setting
from node.model.inner import learning_rate
from node.model.stage import Stage
from node.storage.position import Position
from protocol.run.manifest import Manifest

STEPS, MICROBATCHES, SEQUENCES, REPLICAS = 400, 2, 2, 2
HELD_OUT = 512
SHAPES = [(False, 1), (False, 2), (True, 1), (True, 2), (True, 4)]  # tied or not, stages


def manifest_of(is_tied: bool, seed: int) -> Manifest:
    tiny = tiny_with_adamw()
    changes = {"tied_embeddings": is_tied, "seed": seed}
    return tiny.model_copy(update={"model": tiny.model.model_copy(update=changes)})


def swarm_loss(is_tied: bool, stages: int, seed: int, steps: int) -> float:
    base = manifest_of(is_tied, seed)
    setting = one_setting(
        base,
        steps,
        MICROBATCHES,
        SEQUENCES,
        replicas=REPLICAS,
        stages=stages,
        seed=seed,
        validation_sequences=HELD_OUT,
    )
    return simulate(setting).loss


def plain_loss(is_tied: bool, seed: int, steps: int) -> float:
    base = manifest_of(is_tied, seed)
    manifest = one_setting(base, steps, MICROBATCHES, SEQUENCES, stages=1).manifest
    inner, data = manifest.inner, text_of(manifest)
    start = Position(data.identity)
    lines = [data.batches(f"seed {seed}", f"{replica}", manifest, start) for replica in range(REPLICAS)]
    stage = Stage(manifest, 0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(manifest)))
    model.load_state_dict({stage.checkpoint_name(n): p for n, p in stage.named_parameters()}, strict=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(inner.beta1, inner.beta2), eps=inner.eps, weight_decay=inner.weight_decay
    )
    for step in range(steps):
        for line in lines:
            for (inputs, labels), _ in islice(line, MICROBATCHES):
                loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
                (loss / (REPLICAS * MICROBATCHES)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = list(data.validation_batches(manifest.data.sequence_tokens, 32, HELD_OUT))
        losses = [F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item() for x, y in batches]
    return fmean(losses)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = arguments_of(parser, steps=5, seeds=1)
    torch.set_num_threads(1)
    report, seeds = Report("tied", arguments.json), range(arguments.seeds)
    ratios, results = {}, []
    plain = {
        is_tied: [plain_loss(is_tied, seed, arguments.steps) for seed in seeds] for is_tied in (False, True)
    }
    for is_tied, losses in plain.items():
        report.tell_row({"tied": is_tied, "plain_PyTorch": round(fmean(losses), 4)})
    for is_tied, stages in SHAPES:
        losses = [swarm_loss(is_tied, stages, seed, arguments.steps) for seed in seeds]
        difference = round(fmean(losses) - fmean(plain[is_tied]), 4)
        row = {
            "tied": is_tied,
            "stages": stages,
            "loss": round(fmean(losses), 4),
            "by_seed": [round(loss, 4) for loss in losses],
            "above_plain": difference,
        }
        report.tell_row(row)
        results.append(row)
        ratios[f"{'tied' if is_tied else 'untied'}_{stages}_stages_above_plain"] = difference
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
