"""What a pipeline of processes on one GPU costs: 2 and 4 stages against plain PyTorch on the same GPU.

Each stage is a `noloco-node` as it ships, all on one CUDA device in bf16, which they share; the plain loop trains the
whole model in one process: the same microbatches, autocast, AdamW and clipping, no network. Ratios `two_stages` and
`four_stages` are tokens per second by those of the loop, medians over the repeats; `noloco trace` tells beside each
how much of the time its stages computed. The processes take turns on the GPU, so what is lost is what they do not
hide: copies, encoding, the network of the host.

Without a CUDA device it says so; `--device cpu --preset tiny` runs the same on a processor, to try it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from pipelines.chain import Chain, ChainFailed
from pipelines.plain import train_plainly
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.traces import time_of_nodes
from node.model.execution import choose_execution
from node.model.replica import Replica
from node.model.resources import room_on
from protocol.manifest import Manifest, load_preset

STAGES = {2: "two_stages", 4: "four_stages"}
WARM_UP_STEPS = 3


def manifest_of(preset: str, stages: int) -> Manifest:
    base = load_preset(preset)
    data = base.data.model_copy(update={"source": "python-stdlib"})
    return base.model_copy(update={"stages": stages, "data": data})


def plain_loop(preset: str, device: str, seconds: float) -> float:
    """Tokens per second of the whole model in this process."""
    manifest, where = manifest_of(preset, 1), torch.device(device)
    whole = Replica(manifest, 0, device)
    whole.passes.execute(choose_execution(manifest, 0, where, room_on(where).free))
    return train_plainly(whole, seconds, WARM_UP_STEPS)


def plain(preset: str, device: str, seconds: float) -> float:
    """The same in a process of its own, which leaves nothing on the device."""
    command = [sys.executable, __file__, "--plain", preset, device, str(seconds)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def chained(preset: str, device: str, stages: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of the stages together, and the fraction of the time that each worked."""
    places: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * (stages + 1)
    with Chain(manifest_of(preset, stages), places, traced=True, device=device) as chain:
        chain.wait_for_steps(WARM_UP_STEPS)
        rate = chain.tokens_per_second(seconds)
        time.sleep(1.5)  # until the traces are written
        nodes = time_of_nodes(chain.traces)
    return {
        "tokens_per_second": round(rate),
        "computing": [round(float(node.computing), 3) for node in nodes],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--preset", default="llama-125m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", type=int, nargs="+", choices=tuple(STAGES), default=tuple(STAGES))
    parser.add_argument("--plain", nargs=3, help=argparse.SUPPRESS)
    arguments = arguments_of(parser, device="cpu", preset="tiny", stages=[2], repeats=1, seconds=2.0)
    if arguments.plain:
        preset, device, seconds = arguments.plain
        print(plain_loop(preset, device, float(seconds)))
        return
    report, results = Report("gpu", arguments.json), []
    if arguments.device.startswith("cuda"):
        if not torch.cuda.is_available():
            report.tell("There is no CUDA device here, so nothing was measured; see --help.")
            return
        report.tell(torch.cuda.get_device_name(torch.device(arguments.device)))
    for _ in range(arguments.repeats):
        loop = plain(arguments.preset, arguments.device, arguments.seconds)
        for stages in arguments.stages:
            row = chained(arguments.preset, arguments.device, stages, arguments.seconds)
            row = {"stages": stages, "plain_loop": round(loop), **row}
            row["ratio"] = round(row["tokens_per_second"] / loop, 3)
            report.tell_row(row)
            results.append(row)
    ratios = {
        STAGES[stages]: round(median(row["ratio"] for row in results if row["stages"] == stages), 3)
        for stages in arguments.stages
    }
    report.conclude(ratios, results, f"median of {arguments.repeats}")


if __name__ == "__main__":
    run(main, ChainFailed)
