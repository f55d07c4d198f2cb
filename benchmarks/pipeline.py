"""What a pipeline over the network costs: two stages on two cores against a plain PyTorch loop on the same cores.

Two `noloco-node` processes as they ship, one torch thread each, each with its own p2pd, train a Llama of eight
layers cut in the middle, eight microbatches of 4 × 256 tokens to an inner step. The plain loop trains the whole model
with two torch threads: the same microbatches, AdamW and clipping, no network. They take turns within each repeat.
Ratios `hidden_128`, `hidden_256` and `hidden_512` are tokens per second of the two stages by those of the loop,
medians over the repeats; with `_stale` those of the same stages with a staleness of one. One more run is traced: what
fraction of the time each stage computes, and what it stands still for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from pipelines.chain import Chain, ChainFailed, manifest_of
from pipelines.plain import train_plainly
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.traces import time_of_nodes
from node.model.replica import Replica

HIDDEN = (128, 256, 512)
WARM_UP_STEPS = 2
TRACE_SECONDS = 1.5  # until a trace is written
SKIP_SECONDS = 3.0  # of a trace: the stages meet and warm up
STALENESS = {"pipeline": 0, "stale": 1}  # the setting of the presets, and forward passes ahead of the step
PLACES: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * 3


def plain_loop(hidden: int, seconds: float, threads: int) -> float:
    """Tokens per second of the whole model in this process."""
    torch.set_num_threads(threads)
    return train_plainly(Replica(manifest_of(hidden).model_copy(update={"stages": 1}), 0), seconds, 1)


def plain(hidden: int, seconds: float, threads: int) -> float:
    """The same in a process of its own, which leaves no threads behind."""
    command = [sys.executable, __file__, "--plain", str(hidden), str(seconds), str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def chained(hidden: int, seconds: float, staleness: int) -> float:
    with Chain(manifest_of(hidden, staleness=staleness), PLACES) as chain:
        chain.wait_for_steps(WARM_UP_STEPS)
        return chain.tokens_per_second(seconds)


def traced(hidden: int, seconds: float) -> list[dict[str, Any]]:
    """Where the time of each stage goes, from the traces of one more run, which counts in no ratio."""
    with Chain(manifest_of(hidden), PLACES, traced=True) as chain:
        chain.wait_for_steps(WARM_UP_STEPS)
        chain.tokens_per_second(seconds)
        time.sleep(TRACE_SECONDS)
        nodes = time_of_nodes(chain.traces, skip=SKIP_SECONDS)
    return [
        {
            "hidden": hidden,
            "stage": stage,
            "computing": round(node.computing, 3),
            **{str(cause): round(share, 3) for cause, share in node.idle.items()},
        }
        for stage, node in enumerate(nodes)
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--hidden", type=int, action="append", help=f"only this size; default {HIDDEN}")
    parser.add_argument("--stale", action="store_true", help="with a staleness of one, too")
    parser.add_argument("--plain", nargs=3, help=argparse.SUPPRESS)
    arguments = arguments_of(parser, hidden=[64], repeats=1, seconds=2.0)
    if arguments.plain:
        hidden, seconds, threads = arguments.plain
        print(plain_loop(int(hidden), float(seconds), int(threads)))
        return
    report = Report("pipeline", arguments.json)
    variants = STALENESS if arguments.stale else {"pipeline": 0}
    results: list[dict[str, float]] = []
    times: list[dict[str, Any]] = []
    for hidden in arguments.hidden or HIDDEN:
        times += traced(hidden, arguments.seconds)
        for _ in range(arguments.repeats):
            loop = plain(hidden, arguments.seconds, 2)
            rates = {name: chained(hidden, arguments.seconds, value) for name, value in variants.items()}
            results.append({"hidden": hidden, "plain_loop": loop, **rates})
            report.tell(
                f"hidden {hidden}   plain loop {loop:8,.0f} tokens/s"
                + "".join(f"   {name} {rate:8,.0f} ({rate / loop:.3f})" for name, rate in rates.items())
            )
    ratios = {
        f"hidden_{hidden}{suffix}": round(
            median(row[name] / row["plain_loop"] for row in results if row["hidden"] == hidden), 3
        )
        for hidden in arguments.hidden or HIDDEN
        for name, suffix in (("pipeline", ""), ("stale", "_stale"))
        if name in variants
    }
    for row in times:
        report.tell_row(row)
    report.conclude(ratios, [*results, *times], f"median of {arguments.repeats}")


if __name__ == "__main__":
    run(main, ChainFailed)
