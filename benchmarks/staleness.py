"""What hiding the way to the next stage costs in learning: loss with and without staleness and the default codec.

The daemon's own code for 4 replicas × 2 stages in one process under virtual time, 50 ms one way between any two
peers (`noloco simulate learning`): the tiny preset, about a million tokens, random routing. Two shapes of an inner
step: one microbatch of two sequences, where every gradient of the first stage is a step old, and four of one. Against
fp32 with no staleness stand bf16 alone, staleness alone, and both. Outcomes are kept in docs/data/staleness.jsonl;
those that are there are not run again. Ratios are differences of the mean loss over the seeds, in nats, and the steps
per virtual second, where latency is modelled and computing takes made-up times.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from pipelines.published import tiny_with_adamw
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.simulation.learning import LearningResult, LearningSetting
from bootstrap.lab.simulation.study import one_setting, run_study

RESULTS = Path(__file__).parents[1] / "docs" / "data" / "staleness.jsonl"
STEPS = 1000  # of the first shape; of the second half as many, for as many tokens
SHAPES = {"one": (1.0, 1, 2), "four": (0.5, 4, 1)}  # share of the steps, microbatches, sequences
WIRES = {
    "fp32": {"activations": "fp32", "gradients": "fp32"},
    "bf16": {"activations": "bf16", "gradients": "bf16"},
}
VARIANTS = [("fp32", 0), ("bf16", 0), ("fp32", 1), ("bf16", 1)]
LATENCY = 0.05


def setting(steps: int, shape: str, codec: str, staleness: int, seed: int) -> LearningSetting:
    share, microbatches, sequences = SHAPES[shape]
    return one_setting(
        tiny_with_adamw(),
        int(share * steps),
        microbatches,
        sequences,
        staleness=staleness,
        wire=WIRES[codec],
        latency=LATENCY,
        seed=seed,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = arguments_of(parser, results=None, steps=4, seeds=1, jobs=1)
    report = Report("staleness", arguments.json)
    wanted = {
        (shape, codec, staleness, seed): setting(arguments.steps, shape, codec, staleness, seed)
        for seed in range(arguments.seeds)
        for shape in SHAPES
        for codec, staleness in VARIANTS
    }

    def told(outcome: LearningResult, done: int, total: int) -> None:
        report.tell(f"{done}/{total}  loss {outcome.loss:.4f}  ({outcome.wall_seconds:.0f} s)")

    found = dict(
        zip(wanted, run_study(list(wanted.values()), arguments.results, arguments.jobs, told), strict=True)
    )
    ratios, results = {}, []
    for shape in SHAPES:
        for codec, staleness in VARIANTS:
            outcomes = [found[shape, codec, staleness, seed] for seed in range(arguments.seeds)]
            plain = [found[shape, "fp32", 0, seed] for seed in range(arguments.seeds)]
            loss = fmean(o.loss for o in outcomes)
            speed = fmean(
                max(o.steps_per_second) / max(p.steps_per_second)
                for o, p in zip(outcomes, plain, strict=True)
            )
            difference = loss - fmean(o.loss for o in plain)
            result = {
                "step": shape,
                "codec": codec,
                "staleness": staleness,
                "loss": round(loss, 4),
                "by_seed": [round(o.loss, 4) for o in outcomes],
                "difference": round(difference, 4),
                "speed": round(speed, 3),
            }
            results.append(result)
            report.tell_row(result)
            if (codec, staleness) != VARIANTS[0]:
                ratios[f"{shape}_{codec}_staleness_{staleness}_loss"] = round(difference, 4)
                ratios[f"{shape}_{codec}_staleness_{staleness}_speed"] = round(speed, 3)
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
