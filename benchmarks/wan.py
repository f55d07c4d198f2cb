"""How well the way between two stages is hidden: tokens per second on long and narrow links.

Two `noloco-node` processes as they ship, one stage each, and a seed peer, each in a network namespace of its own. The
links are shaped to 1000, 300, 100 and 30 Mbit/s each way and 10, 50 and 150 ms one way, for each codec of activations
and gradients, and between any two of these they are not shaped at all: that is what a shape is compared with. Needs
root. The bound of a shape is the unshaped speed, or what the codec's bytes leave of the bandwidth if that is less.

An inner step has 32 microbatches, and nothing of the next one runs before it is applied (staleness 0), so each step
waits once for a round trip. Ratios, medians over the repeats: `worst_vs_unshaped` among the shapes whose bandwidth
allows 1.3 times the unshaped speed, and `worst_vs_bound` among all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from functools import partial
from statistics import median
from typing import Any

from pipelines.chain import Chain, ChainFailed, manifest_of
from shaping.links import LinksUnavailable, Shape, ShapedLinks

from protocol.codec import nbytes_of

PEERS = 3  # the seed peer and two stages
MBIT = (1000.0, 300.0, 100.0, 30.0)
ONE_WAY_MS = (10.0, 50.0, 150.0)
CODECS = ("fp32", "bf16", "int8")
UNSHAPED = Shape(math.inf, 0.0)
WARM_UP_STEPS = 2
SETTLE_STEPS = 2  # after the links have changed, in which TCP finds out
SPARE = 1.3


def bandwidth_bound(codec: str, hidden: int, mbit: float) -> float:
    """Tokens per second that a link carries: activations and labels one way, and less, the gradients, the other."""
    bytes_per_token = nbytes_of(codec, (1024, hidden)) / 1024 + 4
    return mbit * 1e6 / 8 / bytes_per_token


def measure(codec: str, arguments: argparse.Namespace, tell: Any) -> list[dict[str, Any]]:
    """All shapes for one codec, each beside the unshaped run before it."""
    manifest = manifest_of(
        arguments.hidden, arguments.microbatches, arguments.staleness, activations=codec, gradients=codec
    )
    shapes = list(itertools.product(arguments.mbit, arguments.latency))
    results = []
    with ShapedLinks(PEERS, UNSHAPED) as links:
        places = [(links.address(peer), links.prefix(peer)) for peer in range(PEERS)]
        with Chain(manifest, places) as chain:
            chain.wait_for_steps(WARM_UP_STEPS)

            def speed(shape: Shape) -> float:
                links.reshape(shape)
                chain.wait_for_steps(len(chain.step_times()) + SETTLE_STEPS)
                return chain.tokens_per_second(arguments.seconds)

            for repeat, (mbit, latency) in itertools.product(range(arguments.repeats), shapes):
                unshaped = speed(UNSHAPED)
                shaped = speed(Shape(mbit, latency / 1e3))
                carried = bandwidth_bound(codec, arguments.hidden, mbit)
                result = {
                    "codec": codec,
                    "mbit": mbit,
                    "one_way_ms": latency,
                    "repeat": repeat,
                    "unshaped": round(unshaped),
                    "shaped": round(shaped),
                    "bandwidth_bound": round(carried),
                    "vs_unshaped": round(shaped / unshaped, 3),
                    "vs_bound": round(shaped / min(unshaped, carried), 3),
                }
                results.append(result)
                tell("   ".join(f"{name} {value}" for name, value in result.items()))
    return results


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each shape and codec: medians, and whether the bandwidth leaves room."""
    rows = []
    for key in dict.fromkeys((row["codec"], row["mbit"], row["one_way_ms"]) for row in results):
        same = [row for row in results if (row["codec"], row["mbit"], row["one_way_ms"]) == key]
        unshaped = median(row["unshaped"] for row in same)
        rows.append(
            {
                "codec": key[0],
                "mbit": key[1],
                "one_way_ms": key[2],
                "has_room": same[0]["bandwidth_bound"] >= SPARE * unshaped,
                "tokens_per_second": median(row["shaped"] for row in same),
                "vs_unshaped": median(row["vs_unshaped"] for row in same),
                "vs_bound": median(row["vs_bound"] for row in same),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=32, help="of an inner step, 1024 tokens each")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0)
    parser.add_argument("--mbit", type=float, nargs="+", default=MBIT)
    parser.add_argument("--latency", type=float, nargs="+", default=ONE_WAY_MS, help="milliseconds one way")
    parser.add_argument("--codec", nargs="+", default=CODECS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tell = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    results = []
    try:
        for codec in arguments.codec:
            results += measure(codec, arguments, tell)
    except LinksUnavailable as reason:
        sys.exit(f"error: {reason}")
    rows = summary(results)
    for row in rows:
        tell("   ".join(f"{name} {value}" for name, value in row.items()))
    ratios = {"worst_vs_bound": min(row["vs_bound"] for row in rows)}
    with_room = [row["vs_unshaped"] for row in rows if row["has_room"]]
    if with_room:
        ratios["worst_vs_unshaped"] = min(with_room)
    if arguments.json:
        print(json.dumps({"benchmark": "wan", "ratios": ratios, "results": rows}))
    for name, value in ratios.items() if not arguments.json else ():
        print(f"{name}: {value:.3f} (median of {arguments.repeats})")


if __name__ == "__main__":
    try:
        main()
    except ChainFailed as error:
        sys.exit(f"error: {error}")
