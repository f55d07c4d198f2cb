"""What a hop costs: activations [8, 512, 1024] in bf16, 8 MB, from one peer to another, with a small reply to each.

Two processes on loopback, each with its own p2pd, several messages in flight. One method after the other within each
repeat, so that whatever else the machine does hits all alike:

    noloco           this project's whole way: torch tensor, encode, Rpc.call, a handler that decodes
    binary_stream    hivemind's bare binary stream, raw bytes with a length before them
    protobuf_stream  hivemind's protobuf stream, a tensor in parts of 4 MiB, as its experts send it
    unary            hivemind's unary call, in as few messages as its limit of 4 MiB allows
    socket           the bytes over one asyncio connection, with neither p2pd nor encryption
    binary_tls       binary_stream with p2pd encrypting as this project's does; in no ratio

Then 64 bytes there and back of another class of traffic, alone and while activations are sent to the same peer:
`small_message_slowdown` is the median round trip during over the median before.

Ratios are medians over the repeats: `goodput_vs_binary_stream`, `goodput_vs_protobuf_stream`, `goodput_vs_unary`,
`goodput_vs_socket`, `small_message_slowdown`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from averaging.coordination import Message, Peer, PeerFailed
from hops.activations import NBYTES
from reporting.report import Report, arguments_of, parser_of, run

FOLDER = Path(__file__).parent
HOST = "127.0.0.1"
IDLE_PINGS = 50
# the process pair that runs a method
PAIRS: dict[str, tuple[str, Message]] = {
    "noloco": ("noloco_hop.py", {}),
    "hivemind": ("hivemind_hop.py", {"encryption": "noise"}),
    "hivemind_tls": ("hivemind_hop.py", {"encryption": "tls"}),
    "socket": ("socket_hop.py", {}),
}
# method: (pair, what the pair calls it)
METHODS = {
    "noloco": ("noloco", "noloco"),
    "binary_stream": ("hivemind", "binary_stream"),
    "protobuf_stream": ("hivemind", "protobuf_stream"),
    "unary": ("hivemind", "unary"),
    "socket": ("socket", "socket"),
    "binary_tls": ("hivemind_tls", "binary_stream"),
}
IN_RATIOS = ("binary_stream", "protobuf_stream", "unary", "socket")
WITH_SMALL = ("noloco", "binary_stream", "binary_tls")


class Hop:
    """A sender and a receiver in processes of their own."""

    def __init__(self, pair: str) -> None:
        script, settings = PAIRS[pair]
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        prefix = ["env", f"PYTHONPATH={path}"]
        self._ends = [Peer(FOLDER / "hops" / script, {"host": HOST, **settings}, prefix) for _ in range(2)]

    def start(self) -> None:
        _, receiver = [end.answer() for end in self._ends]
        self._sender_answers("meet", other=receiver)

    def send(self, method: str, messages: int, in_flight: int) -> Message:
        """MB of activations per second, and the processor milliseconds that all processes spent on a message."""
        before = self._processor_seconds()
        seconds = self._sender_answers("send", method=method, messages=messages, in_flight=in_flight)[
            "seconds"
        ]
        spent = self._processor_seconds() - before
        return {
            "megabytes_per_second": round(messages * NBYTES / seconds / 1e6, 1),
            "processor_milliseconds": round(1e3 * spent / messages, 2),
        }

    def small(self, method: str, messages: int, in_flight: int) -> Message:
        """Milliseconds there and back of a small message, alone and beside `messages` of activations."""
        told = self._sender_answers(
            "small", method=method, messages=messages, in_flight=in_flight, times=IDLE_PINGS
        )
        return {
            "idle_milliseconds": round(1e3 * told["idle"], 3),
            "busy_milliseconds": round(1e3 * told["busy"], 3),
            "slowdown": round(told["busy"] / told["idle"], 2),
            "pings": told["count"],
            "megabytes_per_second": round(messages * NBYTES / told["seconds"] / 1e6, 1),
        }

    def check(self, method: str) -> None:
        """Send a message and compare what came. Raises `PeerFailed`."""
        self._sender_answers("send", method=method, messages=1, in_flight=1)
        self._ends[1].tell("received_checksum")
        if self._ends[1].answer() != self._sender_answers("sent_checksum"):
            raise PeerFailed(f"{method}: what was received is not what was sent")

    def stop(self) -> None:
        for end in self._ends:
            end.stop()

    def _sender_answers(self, command: str, **fields: Any) -> Message:
        self._ends[0].tell(command, **fields)
        return self._ends[0].answer()

    def _processor_seconds(self) -> float:
        return sum(end.processor_seconds() for end in self._ends)


def measure(
    methods: list[str], messages: int, in_flight: int, repeats: int, tell: Callable[[str], None]
) -> list[Message]:
    """Each method in turn, `repeats` times; a row of results for each repeat."""
    hops = {pair: Hop(pair) for pair in dict.fromkeys(METHODS[method][0] for method in methods)}
    results = []
    try:
        for hop in hops.values():
            hop.start()
        for method in methods:
            pair, name = METHODS[method]
            hops[pair].check(name)
            hops[pair].send(name, messages // 2, in_flight)  # the first messages open streams and take memory
        for _ in range(repeats):
            row = {}
            for method in methods:
                pair, name = METHODS[method]
                row[method] = hops[pair].send(name, messages, in_flight)
                if method in WITH_SMALL:
                    row[method]["small"] = hops[pair].small(name, 2 * messages, in_flight)
            results.append(row)
            tell("   ".join(f"{method} {row[method]['megabytes_per_second']:.0f} MB/s" for method in methods))
    finally:
        for hop in hops.values():
            hop.stop()
    return results


def ratios_of(results: list[Message]) -> dict[str, float]:
    """Medians over the repeats of the ratios within each."""

    def goodput(row: Message, method: str) -> float:
        return float(row[method]["megabytes_per_second"])

    ratios = {
        f"goodput_vs_{other}": median(goodput(row, "noloco") / goodput(row, other) for row in results)
        for other in IN_RATIOS
        if other in results[0]
    }
    ratios["small_message_slowdown"] = median(row["noloco"]["small"]["slowdown"] for row in results)
    return {name: round(value, 3) for name, value in ratios.items()}


def table(results: list[Message]) -> str:
    """For each method the median and the range of its goodput, processor time, and its small messages."""
    lines = [f"{'':16}{'MB/s':>8}{'range':>14}{'cpu ms':>9}   small message, ms: alone, beside, slowdown"]
    for method in results[0]:
        rows = [row[method] for row in results]
        rates = sorted(row["megabytes_per_second"] for row in rows)
        spent = median(row["processor_milliseconds"] for row in rows)
        line = f"{method:16}{median(rates):8.0f}{f'{rates[0]:.0f} to {rates[-1]:.0f}':>14}{spent:9.1f}"
        if "small" in rows[0]:
            names = ("idle_milliseconds", "busy_milliseconds", "slowdown")
            line += "   " + "  ".join(f"{median(row['small'][name] for row in rows):.2f}" for name in names)
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--messages", type=int, default=30, help="of 8 MB, in each repeat of each method")
    parser.add_argument("--in-flight", type=int, default=4, help="messages not yet answered, of every method")
    parser.add_argument(
        "--only", nargs="+", choices=list(METHODS), help="these methods beside this project's"
    )
    arguments = arguments_of(parser, repeats=1, messages=4, in_flight=2)
    report = Report("transport", arguments.json)
    methods = [
        method for method in METHODS if not arguments.only or method == "noloco" or method in arguments.only
    ]
    results = measure(methods, arguments.messages, arguments.in_flight, arguments.repeats, report.tell)
    ratios = ratios_of(results)
    report.tell(
        f"\n{arguments.messages} messages of 8 MB, {arguments.in_flight} in flight, medians of {len(results)}"
    )
    report.tell(table(results))
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main, PeerFailed)
