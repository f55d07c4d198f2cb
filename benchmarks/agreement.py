"""Whether the simulator tells the truth: the real swarm and `noloco simulate learning` on one manifest.

For each seed of the initial weights a real swarm (separate processes, p2pd, DHT, gossip over loopback) and a
simulated one train the same manifest on the same number of tokens; their data and pairings are drawn apart, as
between any two runs. Prints `real_minus_simulated`: the difference of the mean final validation losses in nats.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.creating.choosing import RunOptions
from bootstrap.lab.simulation.learning import LearningSetting
from bootstrap.lab.simulation.study import run_study
from protocol.run.manifest import preset_text

REPLICAS = 3  # of each stage, as `noloco swarm` starts by itself
SEQUENCES = 256  # held out, for both


def manifest_file(seed: int, directory: Path) -> Path:
    """The tiny preset with another seed of the initial weights."""
    file = directory / f"seed-{seed}.toml"
    text = preset_text("tiny").replace("[model]\n", f"[model]\nseed = {seed}\n")
    file.write_text(text, encoding="utf-8")
    return file


def real_swarm(file: Path, steps: int, directory: Path) -> tuple[float, int]:
    """Final validation loss in nats per token, and the tokens trained on, of a real swarm on this machine."""
    summary = directory / f"{file.stem}.json"
    command = [
        sys.executable, "-m", "bootstrap.tools_cli", "swarm", "--manifest", str(file), "--steps", str(steps),
        "--replicas", str(REPLICAS), "--minutes", "20", "--state-dir", str(directory / file.stem),
        "--summary", str(summary), "--validation-sequences", str(SEQUENCES), "--device", "cpu",
        "--dashboard", "none",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(summary.read_text(encoding="utf-8"))
    return found["validation_loss"][-1][2], found["tokens"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="0,1,2")
    arguments = arguments_of(parser, steps=10, seeds="0")
    report = Report("agreement", arguments.json)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        files = [manifest_file(seed, directory) for seed in seeds]
        manifests = [RunOptions(file=file, steps=arguments.steps).resolved()[0] for file in files]
        real = [real_swarm(file, arguments.steps, directory) for file in files]
    settings = [
        replace(LearningSetting(manifest, REPLICAS, seed), validation_sequences=SEQUENCES)
        for manifest, seed in zip(manifests, seeds, strict=True)
    ]
    simulated = run_study(settings, None, os.cpu_count() or 1, lambda *_: None)
    results = [
        {
            "seed": seed,
            "real": loss,
            "real_tokens": tokens,
            "simulated": one.loss,
            "simulated_tokens": one.tokens,
        }
        for seed, (loss, tokens), one in zip(seeds, real, simulated, strict=True)
    ]
    gap = mean(loss for loss, _ in real) - mean(one.loss for one in simulated)
    for row in results:
        report.tell(
            f"seed {row['seed']}: real {row['real']:.4f} ({row['real_tokens']:,} tokens)   "
            f"simulated {row['simulated']:.4f} ({row['simulated_tokens']:,} tokens)"
        )
    if len(seeds) > 1:
        report.tell(
            f"spread of the seeds: real {stdev(loss for loss, _ in real):.4f}, "
            f"simulated {stdev(one.loss for one in simulated):.4f}"
        )
    report.conclude({"real_minus_simulated": round(gap, 4)}, results, "nats per token")


if __name__ == "__main__":
    run(main)
