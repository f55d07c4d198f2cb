"""What the opening of a stream costs the first small request on it: two real p2pd on a shaped link, connected before.

Most of the replicas that the search for a partner asks were never asked before. Milliseconds until a byte is back, in
turn: on a new stream whose taking was waited for, on one opened ahead, as `Rpc` does for what is small, and on a
stream that is open. Ratios: `waited` and `ahead`, by that of the open one. Needs root.
"""

from __future__ import annotations

import os
from pathlib import Path

from averaging.coordination import Message, Peer, PeerFailed
from reporting.report import Report, arguments_of, parser_of, run
from shaping.links import LinksUnavailable, Shape, ShapedLinks

FOLDER = Path(__file__).parent
MBIT = 100.0


def measure(one_way: float, times: int) -> Message:
    """Milliseconds by what was waited for, over a link of `one_way` seconds."""
    with ShapedLinks(2, Shape(MBIT, one_way)) as links:
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        ends = [
            Peer(
                FOLDER / "hops" / "stream_opener.py",
                {"host": links.address(number)},
                [*links.prefix(number), "env", f"PYTHONPATH={path}"],
            )
            for number in range(2)
        ]
        try:
            _, other = [end.answer() for end in ends]
            asker = ends[0]
            asker.tell("meet", other=other)
            asker.answer()
            asker.tell("ask", times=times)
            return {name: round(1e3 * seconds, 2) for name, seconds in asker.answer().items()}
        finally:
            for end in ends:
                end.stop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--latency", type=float, nargs="+", default=[20.0, 80.0], help="ms one way")
    parser.add_argument("--times", type=int, default=20, help="streams of each kind")
    arguments = arguments_of(parser, latency=[20.0], times=3)
    report, rows, ratios = Report("opening", arguments.json), [], dict[str, float]()
    for latency in arguments.latency:
        rows.append({"latency": latency} | measure(latency / 1e3, arguments.times))
        report.tell_row(rows[-1])
        for name in ("waited", "ahead"):
            ratios[f"{name}_{latency:g}"] = round(rows[-1][name] / rows[-1]["open"], 3)
    report.conclude(ratios, rows, f"median of {arguments.times}")


if __name__ == "__main__":
    run(main, PeerFailed, LinksUnavailable)
