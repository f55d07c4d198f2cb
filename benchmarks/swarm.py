"""What the swarm costs beyond its arithmetic: tokens per second against plain PyTorch loops on the same cores.

The swarm is `noloco swarm` as it ships (2 stages × 3 replicas, separate processes, p2pd, DHT, gossip). Against it
stands one plain loop per core over the whole model: same microbatches, same optimizer, no network, no gossip. Both
use every core of this machine, one after the other, in the same run. Prints `swarm_vs_plain_loops`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from pipelines.plain import train_plainly
from reporting.report import Report, arguments_of, parser_of, run

from node.model.replica import Replica
from protocol.run.manifest import Manifest, load_preset


def plain_loop(manifest: Manifest, seconds: float, device: str) -> float:
    """Tokens per second of one thread training the whole model for about `seconds`."""
    torch.set_num_threads(1)
    return train_plainly(Replica(manifest.model_copy(update={"stages": 1}), 0, device), seconds)


def plain_loops(seconds: float, device: str) -> float:
    """One loop per core at the same time, or one on a GPU; the sum of their tokens per second."""
    command = [sys.executable, __file__, "--plain-loop", str(seconds), "--device", device]
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range((os.cpu_count() or 1) if device == "cpu" else 1):
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return sum(float(process.communicate()[0]) for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()


def swarm(steps: int, device: str) -> float:
    """Tokens per second that the six nodes together train while all of them run."""
    with tempfile.TemporaryDirectory() as directory:
        summary = Path(directory) / "summary.json"
        command = [
            sys.executable, "-m", "bootstrap.tools_cli", "swarm", "--dashboard", "none", "--steps", str(steps),
            "--state-dir", f"{directory}/run", "--summary", str(summary), "--validation-sequences", "8",
            "--device", device,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return rate_of(Path(directory, "run"))


def rate_of(directory: Path) -> float:
    """Tokens per second that a local swarm trains while all of its stage-0 nodes do, from 20 steps of each on.

    A node that trains on alone, when others have finished, has the cores for itself.
    """
    manifest, steps = load_preset("tiny"), list[list[float]]()
    for file in directory.glob("s0r*/events.jsonl"):
        events = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        steps.append([event["time"] for event in events if event["event"] == "step"])
    first, last = max(times[19] for times in steps), min(times[-1] for times in steps)
    done = sum(first < time <= last for times in steps for time in times)
    return done * manifest.inner.microbatches * manifest.tokens_per_microbatch / (last - first)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the plain loops")
    parser.add_argument("--device", default="cpu", help="of the nodes and the loops: cpu, or a GPU as cuda:0")
    parser.add_argument("--plain-loop", type=float, help=argparse.SUPPRESS)
    arguments = arguments_of(parser, repeats=1, steps=60, seconds=2.0)
    if arguments.plain_loop:
        print(plain_loop(load_preset("tiny"), arguments.plain_loop, arguments.device))
        return
    report = Report("swarm", arguments.json)
    results = []
    for _ in range(arguments.repeats):
        plain = plain_loops(arguments.seconds, arguments.device)
        together = swarm(arguments.steps, arguments.device)
        results.append(
            {"plain_loops": round(plain), "swarm": round(together), "ratio": round(together / plain, 3)}
        )
        report.tell(
            f"plain loops {plain:8,.0f} tokens/s   swarm {together:8,.0f} tokens/s   {together / plain:.3f}"
        )
    ratios = {"swarm_vs_plain_loops": median(result["ratio"] for result in results)}
    report.conclude(ratios, results, f"median of {arguments.repeats}")


if __name__ == "__main__":
    run(main)
