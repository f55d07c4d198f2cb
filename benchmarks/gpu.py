"""How close to the hardware a node computes: two tables and their ratios for the GPU at hand.

1. Tokens per second of a whole model in one process, as a node computes it, against a loop tuned by hand with no
   regard for a swarm (pipelines/tuned.py): `whole_125m`, `whole_1.3b`, with the share of what a large matrix product
   reaches. Two and four stages as nodes of their own on the same device against the same loop: `two_stages`,
   `four_stages`, and `…_bound_bf16`, `…_bound_int8`: what p2pd could carry here with that codec, by the loop.
2. Milliseconds of a microbatch of each stage, as benchmarks/stage.py measures it.
3. Around the microbatch: `outer_step_by_bytes`, its time by that of its bytes at the bandwidth measured;
   `snapshot_stall_ms`, how long the device stands still for one; `round_blocked_s` between two nodes.

Medians over the repeats. Every measurement has a process of its own, which leaves nothing on the device. Without a
CUDA device it says so; `--device cpu --preset tiny` runs all of it small, on a processor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
import transport
from averaging.coordination import PeerFailed
from devices.around import arithmetic_of, around, blocked_by_a_round
from pipelines.chain import Chain, ChainFailed
from pipelines.plain import train_plainly
from pipelines.tuned import train_tuned
from reporting.report import Report, arguments_of, parser_of, run
from stage import measure

from bootstrap.traces import time_of_nodes
from node.model.dry_run import dry_run
from node.model.execution import choose_execution, described
from node.model.memory_model import backward_bytes, forward_bytes
from node.model.replica import Replica
from node.model.resources import room_on
from node.model.stage import work_of
from protocol.run.manifest import Manifest, load_preset

NAMES = {1: "one_stage", 2: "two_stages", 4: "four_stages"}
WARM_UP_STEPS = 3
MOST_MESSAGES = 24  # of 8 MB through p2pd
Row = dict[str, Any]


def manifest_of(preset: str, stages: int = 1, **wire: str) -> Manifest:
    base = load_preset(preset)
    base = base.model_copy(update={"data": base.data.model_copy(update={"source": "python-stdlib"})})
    return base.model_copy(
        update={
            "stages": stages,
            "data": base.data.model_copy(update={"source": "python-stdlib"}),
            "wire": base.wire.model_copy(update=wire),
        }
    )


# --- each in a process of its own ----------------------------------------------------------------


def whole(preset: str, device: str, seconds: float) -> Row:
    """As a node computes the whole model, in the way that its dry run finds."""
    manifest, where = manifest_of(preset), torch.device(device)
    execution = choose_execution(manifest, 0, where, room_on(where).free, compile="auto")
    replica = Replica(manifest, 0, device)
    replica.passes.execute(execution)
    dry_run(replica, "auto", 0)
    rate = train_plainly(replica, seconds, WARM_UP_STEPS)
    return {"tokens_per_second": rate, "way": described(replica.passes.execution, manifest, 0)}


def tuned(preset: str, device: str, seconds: float) -> Row:
    where = torch.device(device)
    rate = train_tuned(manifest_of(preset), where, seconds, compiles=where.type == "cuda")
    work = 6 * work_of(manifest_of(preset), 0)
    return {"tokens_per_second": rate, "work": work, "arithmetic": arithmetic_of(where)}


def stages_of(preset: str, device: str, stages: float) -> Row:
    manifest, where = manifest_of(preset, int(stages)), torch.device(device)
    rows = [measure(manifest, stage, where, where.type == "cuda", 5) for stage in range(manifest.stages)]
    return {"rows": rows}


def beside(preset: str, device: str, _: float) -> Row:
    return around(manifest_of(preset), torch.device(device))


WORKERS = {work.__name__: work for work in (whole, tuned, stages_of, beside)}


def apart(work: str, preset: str, device: str, amount: float) -> Row:
    command = [sys.executable, __file__, "--worker", work, preset, device, str(amount)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ChainFailed(f"{work} of {preset}: {done.stderr.strip()[-800:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


# --- nodes ---------------------------------------------------------------------------------------


def chained(preset: str, device: str, stages: int, seconds: float) -> Row:
    """Tokens per second of the stages together, and the fraction of the time that each worked."""
    places: list[tuple[str, list[str]]] = [("127.0.0.1", [])] * (stages + 1)
    with Chain(manifest_of(preset, stages), places, traced=True, device=device) as chain:
        chain.wait_for_steps(WARM_UP_STEPS)
        rate = chain.tokens_per_second(seconds)
        time.sleep(1.5)  # until the traces are written
        nodes = time_of_nodes(chain.traces)
    return {"tokens_per_second": rate, "computing": [round(float(node.computing), 3) for node in nodes]}


def goodput(messages: int) -> float:
    """Bytes a second between two peers on this machine."""
    [row] = transport.measure(["noloco"], messages, 4, 1, lambda _: None)
    return 1e6 * float(row["noloco"]["megabytes_per_second"])


def carried(preset: str, stages: int, codec: str, bytes_a_second: float) -> float:
    """Tokens per second whose activations and gradients p2pd could carry over all of the boundaries."""
    manifest = manifest_of(preset, stages, activations=codec, gradients=codec)
    moved = forward_bytes(manifest) + backward_bytes(manifest)
    return bytes_a_second * manifest.tokens_per_microbatch / (moved * (manifest.hops - 1))


def round_between_two(preset: str, device: str) -> float:
    manifest = manifest_of(preset)
    short = manifest.outer.model_copy(update={"inner_steps": 5})
    half = manifest.model.model_copy(update={"layers": max(1, manifest.model.layers // 2)})
    return blocked_by_a_round(manifest.model_copy(update={"outer": short, "model": half}), device)


def rounded(row: Row) -> Row:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def in_one_process(presets: Iterable[str], device: str, seconds: float, report: Report) -> list[Row]:
    rows = []
    for preset in presets:
        loop, ours = apart("tuned", preset, device, seconds), apart("whole", preset, device, seconds)
        rate, fastest = ours["tokens_per_second"], loop["tokens_per_second"]
        row = {"preset": preset, "tuned_loop": round(fastest), **ours, "ratio": rate / fastest}
        row |= {"share_of_arithmetic": rate * loop["work"] / loop["arithmetic"]}
        rows.append(row | {"tuned_share": fastest * loop["work"] / loop["arithmetic"]})
        report.tell_row(rounded(rows[-1]))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument(
        "--preset", nargs="+", default=["llama-125m", "llama-1.3b"], help="the first also as stages"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 4), default=(2, 4))
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = arguments_of(parser, device="cpu", preset=["tiny"], stages=[2], repeats=1, seconds=1.0)
    if arguments.worker:
        work, preset, device, amount = arguments.worker
        if device == "cpu":
            torch.set_num_threads(1)  # as the nodes
        print(json.dumps(WORKERS[work](preset, device, float(amount))))
        return
    report = Report("gpu", arguments.json)
    if arguments.device.startswith("cuda"):
        if not torch.cuda.is_available():
            report.tell("There is no CUDA device here, so nothing was measured; see --help.")
            return
        report.tell(torch.cuda.get_device_name(torch.device(arguments.device)))
    ratios, results = compared(arguments, report)
    report.conclude({name: round(value, 3) for name, value in ratios.items()}, results)


def compared(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, float], list[Row]]:
    device, seconds, first = arguments.device, arguments.seconds, arguments.preset[0]
    results: list[Row] = []
    carries = goodput(MOST_MESSAGES if device.startswith("cuda") else 2)
    for _ in range(arguments.repeats):
        results += in_one_process(arguments.preset, device, seconds, report)
        loop = next(row["tuned_loop"] for row in reversed(results) if row.get("preset") == first)
        for stages in arguments.stages:
            row = {"stages": stages, **chained(first, device, stages, seconds)}
            row["ratio"] = row["tokens_per_second"] / loop
            row |= {
                f"bound_{codec}": carried(first, stages, codec, carries) / loop for codec in ("bf16", "int8")
            }
            report.tell_row(rounded(row))
            results.append(row)
    ratios = {}
    for preset in arguments.preset:
        name = f"whole_{preset.removeprefix('llama-')}"
        ratios[name] = median(row["ratio"] for row in results if row.get("preset") == preset)
    for stages in arguments.stages:
        rows = [row for row in results if row.get("stages") == stages]
        for name in ("ratio", "bound_bf16", "bound_int8"):
            full = NAMES[stages] if name == "ratio" else f"{NAMES[stages]}_{name}"
            ratios[full] = median(row[name] for row in rows)
    for preset, stages in zip(arguments.preset, (2, 4), strict=False):
        for row in apart("stages_of", preset, device, stages)["rows"]:
            results.append({"microbatch_of": preset, **row})
            report.tell_row(rounded(results[-1]))
    row = apart("beside", first, device, 0)
    row["round_blocked_s"] = round_between_two(first, device)
    report.tell_row(rounded(row))
    ratios["outer_step_by_bytes"] = row["outer_step_ms"] / row["its_bytes_ms"]
    ratios |= {name: row[name] for name in ("snapshot_stall_ms", "round_blocked_s")}
    return ratios, [*results, row]


if __name__ == "__main__":
    run(main, ChainFailed, PeerFailed)
