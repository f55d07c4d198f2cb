"""How well the way between two stages is hidden: tokens per second on long and narrow links.

Two `noloco-node` processes as they ship, one stage each, and a seed peer, each in a network namespace of its own. The
links are shaped to 1000, 300, 100 and 30 Mbit/s each way and 10, 50 and 150 ms one way, for each codec of activations
and gradients. Before and after each latency they are not shaped at all, and each step on a shaped link is compared
with the median one of those. Needs root. The bound of a shape is the unshaped speed, or what the codec's bytes leave
of the bandwidth if that is less.

An inner step has 16,384 tokens, and nothing of the next one runs before it is applied (staleness 0), so each step
waits once for a round trip and for a microbatch's bytes each way: `--sequences` says how many those are. With
`--hidden 128` the stages compute so little for each byte that the packets' own processor time, which the namespaces
share with the stages, decides. Ratios, medians over the steps: `worst_vs_unshaped` and `mean_vs_unshaped` among the
shapes whose bandwidth allows 1.3 times the unshaped speed, and `worst_vs_bound` among all. `computing vs unshaped`
compares the shares of time in which the last stage computes: what waiting alone costs. `processor vs unshaped`
compares what both stages' threads get of the processor time that the machine has: what waiting and packets cost
together, or the tokens a second that there would be if its cores were always as fast. Where other guests of its
hypervisor take more than 2 % of it, steps are measured again.

`least_promised` and `most_promised` are what `noloco manifest check` says of these links for a machine of the
unshaped speed, by what was measured.

`--promise` does nothing else than to hold what that command says, with this machine measured, against a swarm on
four links, two full and two wide, one of each with a narrower uplink: `least_promised`, `most_promised`, and
`limits_right`, the share of links whose limiting part it named.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from pipelines.chain import Chain, ChainFailed, Step, manifest_of
from pipelines.promise import promised
from pipelines.promised_links import FOUR, compared
from reporting.report import Report, arguments_of, parser_of, run
from shaping.links import LinksUnavailable, Shape, ShapedLinks

from bootstrap.checking.costs import Limit
from protocol.codecs.codec import nbytes_of
from protocol.run.manifest import Manifest

PEERS = 3  # the seed peer and two stages
MBIT = (1000.0, 300.0, 100.0, 30.0)
ONE_WAY_MS = (10.0, 50.0, 150.0)
CODECS = ("fp32", "bf16", "int8")
UNSHAPED = Shape(math.inf, 0.0)
WARM_UP_STEPS = 2
# after another latency: yamux, which widens its windows by the round trip, measures that every 30 seconds, and BBR
# forgets the shortest one after 10
SETTLE_SECONDS = 35.0
SPARE = 1.3


def bandwidth_bound(codec: str, hidden: int, mbit: float) -> float:
    """Tokens per second that a link carries: activations and labels one way, and less, the gradients, the other."""
    bytes_per_token = nbytes_of(codec, (1024, hidden)) / 1024 + 4
    return mbit * 1e6 / 8 / bytes_per_token


@dataclass(frozen=True)
class Shaped:
    """What was measured on one link."""

    mbit: float
    steps: list[Step]
    resends: int


def on_links(chain: Chain, links: ShapedLinks, latency: float, arguments: argparse.Namespace) -> list[Shaped]:
    """All bandwidths, one after another, with one latency in milliseconds."""
    links.reshape(Shape(max(arguments.mbit), latency / 1e3))
    time.sleep(arguments.settle)
    found = []
    for mbit in arguments.mbit:
        links.reshape(Shape(mbit, latency / 1e3))
        resends = len(chain.events("resend"))
        steps = chain.steady_steps(arguments.repeats)
        found.append(Shaped(mbit, steps, len(chain.events("resend")) - resends))
    links.reshape(UNSHAPED)
    return found


def manifest_with(codec: str, arguments: argparse.Namespace) -> Manifest:
    sizes = arguments.hidden, arguments.microbatches, arguments.staleness, arguments.sequences
    return manifest_of(*sizes, activations=codec, gradients=codec)


def measure(codec: str, arguments: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """All latencies and bandwidths with one codec, in one swarm."""
    manifest = manifest_with(codec, arguments)
    results = []
    with ShapedLinks(PEERS, UNSHAPED, arguments.packet_bytes) as links:
        places = [(links.address(peer), links.prefix(peer)) for peer in range(PEERS)]
        with Chain(manifest, places) as chain:
            chain.wait_for_steps(WARM_UP_STEPS)
            before = chain.steady_steps(arguments.repeats)
            for latency in arguments.latency:
                found = on_links(chain, links, latency, arguments)
                after = chain.steady_steps(arguments.repeats)
                report.tell(
                    f"unshaped: {', '.join(f'{step.speed:.0f}' for step in before)} tokens/s before, "
                    f"{', '.join(f'{step.speed:.0f}' for step in after)} after"
                )
                for shaped in found:
                    carried = bandwidth_bound(codec, arguments.hidden, shaped.mbit)
                    facts: dict[str, Any] = {"codec": codec, "mbit": shaped.mbit, "one_way_ms": latency}
                    facts |= result_of(shaped, carried, before + after)
                    told, limit = promised(manifest, facts["unshaped"], shaped.mbit, latency)
                    facts |= {
                        "promised_vs_shaped": round(told / facts["shaped"], 3),
                        "limited_by": limit.value,
                    }
                    results.append(facts)
                    report.tell_row(results[-1])
                before = after
    return results


def result_of(shaped: Shaped, carried: float, unshaped: list[Step]) -> dict[str, Any]:
    """Beside the unshaped steps before and after, and what the bandwidth carries, in tokens per second."""
    usual = median(step.speed for step in unshaped)
    ratios = [step.speed / usual for step in shaped.steps]
    return {
        "unshaped": round(usual),
        "shaped": round(median(step.speed for step in shaped.steps)),
        "bandwidth_bound": round(carried),
        "resends": shaped.resends,
        "has_room": carried >= SPARE * usual,
        "stolen": round(max(step.stolen for step in shaped.steps + unshaped), 3),
        "of_each_step": [round(ratio, 3) for ratio in ratios],
        "vs_unshaped": round(median(ratios), 3),
        "vs_bound": round(median(ratios) * usual / min(usual, carried), 3),
        "computing_vs_unshaped": _ratio(
            [step.computing for step in shaped.steps], [step.computing for step in unshaped]
        ),
        "processor_vs_unshaped": _ratio(
            [step.processor for step in shaped.steps], [step.processor for step in unshaped]
        ),
    }


def _ratio(shaped: list[float], unshaped: list[float]) -> float | None:
    """Of the medians; None where the steps were shorter than a tick of the processor's clock."""
    usual = median(unshaped)
    return round(median(shaped) / usual, 3) if usual else None


def hold_to_promise(arguments: argparse.Namespace, report: Report) -> None:
    """Four links with the first codec: promised, measured and the parts that limit."""
    codec = arguments.codec[0]
    manifest = manifest_with(codec, arguments)
    rows = []
    for shape in FOUR:
        rows.append(compared(manifest, shape, arguments.repeats))
        report.tell_row(rows[-1])
    # either direction of a link carries as much, and both are as full: naming one is naming the other
    right = [
        Limit(row["limit_promised"]).is_link == Limit(row["limit_seen"]).is_link
        and (row["up_mbit"] == row["down_mbit"] or row["limit_promised"] == row["limit_seen"])
        for row in rows
    ]
    promises = [row["ratio"] for row in rows]
    ratios = {"least_promised": min(promises), "most_promised": max(promises), "limits_right": mean(right)}
    report.conclude(ratios, rows, f"medians of {arguments.repeats} steps")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="inner steps measured on each link")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=64, help="of an inner step")
    parser.add_argument("--sequences", type=int, default=1, help="of 256 tokens, in a microbatch")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--packet-bytes", type=int, default=1500, help="at most")
    parser.add_argument("--mbit", type=float, nargs="+", default=MBIT)
    parser.add_argument("--latency", type=float, nargs="+", default=ONE_WAY_MS, help="milliseconds one way")
    parser.add_argument(
        "--settle", type=float, default=SETTLE_SECONDS, help="seconds, after a latency changed"
    )
    parser.add_argument("--codec", nargs="+", default=CODECS)
    parser.add_argument("--promise", action="store_true", help="compare with manifest check --measure")
    arguments = arguments_of(
        parser, repeats=1, hidden=64, microbatches=4, mbit=[300.0], latency=[10.0], codec=["bf16"], settle=1.0
    )
    report = Report("wan", arguments.json)
    if arguments.promise:
        hold_to_promise(arguments, report)
        return
    rows = []
    for codec in arguments.codec:
        rows += measure(codec, arguments, report)
    ratios = {"worst_vs_bound": min(row["vs_bound"] for row in rows)}
    promises = [row["promised_vs_shaped"] for row in rows]
    ratios |= {"least_promised": min(promises), "most_promised": max(promises)}
    with_room = [row for row in rows if row["has_room"]]
    if with_room:
        speeds = [row["vs_unshaped"] for row in with_room]
        ratios["worst_vs_unshaped"] = min(speeds)
        ratios["mean_vs_unshaped"] = round(mean(speeds), 3)
        processor = [
            row["processor_vs_unshaped"] for row in with_room if row["processor_vs_unshaped"] is not None
        ]
        if processor:
            ratios["worst_processor_vs_unshaped"] = min(processor)
    report.conclude(ratios, rows, f"median of {arguments.repeats}")


if __name__ == "__main__":
    run(main, ChainFailed, LinksUnavailable)
