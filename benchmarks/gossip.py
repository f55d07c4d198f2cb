"""What a round costs: from "my inner steps are done" to "my new weights are in place", against hivemind's averaging.

Two peers on loopback, each a process with its own p2pd, hold the same 100 MB of float32. One after the other, so that
whatever else the machine does hits all alike:

    socket      the bytes both ways over one bare asyncio socket
    hivemind    DecentralizedAverager from its trigger on; its group was found beforehand
    plain       a round of this project: z in float32 at the end, the partner found beforehand
    overlapped  a round with φ sent during the inner steps and Δ in int8 at the end
    naive       DecentralizedAverager.step() with its matchmaking, as most programs call it; in no ratio

Then eight peers on links of 100 Mbit/s each way and 50 ms one way: rounds in pairs against hivemind averaging all
eight. That part needs root, for network namespaces. A time is that of the slowest peer, and every averaging is
checked: the weights are what they must be.

Ratios are medians over the repeats: `plain_vs_hivemind`, `overlapped_vs_hivemind`, `plain_vs_socket`,
`eight_vs_hivemind_allreduce`, `eight_overlapped_vs_hivemind_allreduce`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

from averaging.checks import EXACT, QUANTISED, RoundAlone, check_allreduce, check_pairs
from averaging.coordination import Group, Message, Peer, PeerFailed
from averaging.state import INNER_STEPS, manifest_of, shapes_of
from reporting.report import Report, arguments_of, parser_of, run
from shaping.links import LinksUnavailable, Shape, ShapedLinks

PEERS = Path(__file__).with_name("averaging")
MOST_ALONE = 5
SHORT_STEP = 0.03  # seconds of a pretended inner step, in which the partner is found
ROOM_FOR_PHI = 3.0  # of the time that φ needs on a link of its own: it takes half, once the pair is agreed
LOOPBACK_BYTES = Path("/sys/class/net/lo/statistics/tx_bytes")

Place = tuple[str, list[str]]  # the address to listen on, and what to put before a command to run it there
Check = Callable[[list[Message]], None]

METHODS: dict[str, tuple[str, Message, Check | None]] = {
    "socket": ("socket_peer.py", {}, None),
    "hivemind": ("hivemind_peer.py", {}, partial(check_allreduce, tolerance=EXACT)),
    "plain": ("noloco_peer.py", {"overlap": "none"}, partial(check_pairs, tolerance=EXACT)),
    "overlapped": (
        "noloco_peer.py",
        {"overlap": "phi-early", "progress": "int8"},
        partial(check_pairs, tolerance=QUANTISED),
    ),
}


class Contest:
    """Groups of peers, one for each method, on the same places.

    `step_seconds` is what a pretended inner step takes: φ that is sent early must fit into a round of them.
    `bytes_sent` says what all peers together have put on the network so far, `tell` is for people.
    """

    def __init__(
        self,
        places: list[Place],
        megabytes: float,
        step_seconds: float,
        bytes_sent: Callable[[], int],
        tell: Callable[[str], None],
    ) -> None:
        self._places = places
        self._megabytes = megabytes
        self._step_seconds = step_seconds
        self._bytes_sent = bytes_sent
        self._tell = tell
        self._groups: dict[str, Group] = {}

    def start(self, method: str) -> None:
        script, settings, _ = METHODS[method]
        state = {"megabytes": self._megabytes, **settings}
        shared = {
            "state": state,
            "step_seconds": self._step_seconds,
            "shapes": shapes_of(manifest_of(**state)),
            "threads": max(1, (os.cpu_count() or 1) // len(self._places)),
        }
        self._groups[method] = group = Group(
            [Peer(PEERS / script, {"host": host, **shared}, prefix) for host, prefix in self._places]
        )
        group.start()

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()
        self._groups.clear()

    def measure(self, method: str, command: str = "average") -> Message:
        """One averaging: seconds, and what the mean peer sent for it, early φ included. Raises `PeerFailed`.

        Rounds that a replica ended alone are repeated, and counted.
        """
        for alone in range(MOST_ALONE):
            try:
                return {**self._measure(method, command), "alone": alone}
            except RoundAlone as reason:
                self._tell(f"{method}: {reason}")
        raise PeerFailed(f"{method}: replicas ended {MOST_ALONE} rounds in a row alone")

    def _measure(self, method: str, command: str) -> Message:
        _, _, check = METHODS[method]
        before = self._bytes_sent()
        answers, spent = self._groups[method].measure(command)
        sent = self._bytes_sent() - before
        if check is not None:
            check(answers)
        times = [answer["seconds"] for answer in answers]
        return {
            "seconds": round(max(times), 4),
            "mean_seconds": round(mean(times), 4),
            "processor_seconds": round(spent, 2),
            "megabytes_sent": round(sent / 1e6 / len(answers), 1),
            **({"matchmaking": round(answers[0]["matchmaking"], 4)} if command == "naive" else {}),
        }


def two_peers(megabytes: float, repeats: int, tell: Callable[[str], None]) -> list[Message]:
    """All methods in turn, `repeats` times, on loopback."""
    places: list[Place] = [("127.0.0.1", [])] * 2
    contest = Contest(places, megabytes, SHORT_STEP, lambda: int(LOOPBACK_BYTES.read_text()), tell)
    results = []
    try:
        for method in METHODS:
            contest.start(method)
        for method in METHODS:  # the first time opens streams and takes memory
            contest.measure(method)
        for _ in range(repeats):
            result = {method: contest.measure(method) for method in METHODS}
            result["naive"] = contest.measure("hivemind", "naive")
            results.append({"peers": 2, "state_megabytes": megabytes, **result})
            tell(_line(result))
    finally:
        contest.stop()
    return results


def eight_peers(
    megabytes: float, repeats: int, shape: Shape, peers: int, tell: Callable[[str], None]
) -> list[Message]:
    """One method after the other on shaped links, so that two cores hold eight peers only once."""
    by_method: dict[str, list[Message]] = {}
    step_seconds = max(SHORT_STEP, ROOM_FOR_PHI * megabytes * 8 / shape.mbit / INNER_STEPS)
    with ShapedLinks(peers, shape) as links:
        places = [(links.address(peer), links.prefix(peer)) for peer in range(peers)]
        for method in ("hivemind", "plain", "overlapped"):
            contest = Contest(places, megabytes, step_seconds, links.bytes_sent, tell)
            try:
                contest.start(method)
                contest.measure(method)
                by_method[method] = [contest.measure(method) for _ in range(repeats)]
            finally:
                contest.stop()
            tell(_line({method: by_method[method][-1]}))
    return [
        {"peers": peers, "state_megabytes": megabytes, **dict(zip(by_method, row, strict=True))}
        for row in zip(*by_method.values(), strict=True)
    ]


def ratio(results: list[Message], method: str, against: str) -> float:
    ratios = [float(row[method]["seconds"]) / float(row[against]["seconds"]) for row in results]
    return round(median(ratios), 3)


def _line(result: Message) -> str:
    return "   ".join(f"{method} {row['seconds']:.3f} s" for method, row in result.items())


def _summary(results: list[Message]) -> str:
    """Median, spread and bytes of each method."""
    lines = []
    for method in [name for name, value in results[0].items() if isinstance(value, dict)]:
        times = sorted(row[method]["seconds"] for row in results)
        sent = median(row[method]["megabytes_sent"] for row in results)
        spent = median(row[method]["processor_seconds"] for row in results)
        lines.append(
            f"{results[0]['peers']} peers  {method:10}  median {median(times):7.3f} s   "
            f"{times[0]:.3f} to {times[-1]:.3f} s   {spent:5.2f} s of processor   each peer sent {sent:6.1f} MB"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=100.0, help="state of each of two peers")
    parser.add_argument("--eight-megabytes", type=float, default=25.0, help="state of each of eight peers")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each of eight links, each way")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds one way, between eight peers")
    parser.add_argument("--only", choices=("two", "eight"), help="one part of it")
    arguments = arguments_of(parser, only="two", megabytes=2.0, repeats=1)
    report = Report("gossip", arguments.json)
    ratios, results = {}, []
    if arguments.only != "eight":
        two = two_peers(arguments.megabytes, arguments.repeats, report.tell)
        report.tell(_summary(two))
        ratios["plain_vs_hivemind"] = ratio(two, "plain", "hivemind")
        ratios["overlapped_vs_hivemind"] = ratio(two, "overlapped", "hivemind")
        ratios["plain_vs_socket"] = ratio(two, "plain", "socket")
        results += two
    if arguments.only != "two":
        shape = Shape(arguments.mbit, arguments.latency)
        try:
            eight = eight_peers(arguments.eight_megabytes, arguments.repeats, shape, 8, report.tell)
        except LinksUnavailable as reason:
            report.tell(f"Left out the eight peers: {reason}")
        else:
            report.tell(_summary(eight))
            ratios["eight_vs_hivemind_allreduce"] = ratio(eight, "plain", "hivemind")
            ratios["eight_overlapped_vs_hivemind_allreduce"] = ratio(eight, "overlapped", "hivemind")
            results += eight
    report.conclude(ratios, results, f"median of {arguments.repeats}")


if __name__ == "__main__":
    run(main, PeerFailed)
