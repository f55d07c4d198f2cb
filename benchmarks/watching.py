"""What the page costs a swarm that trains: tokens per second with viewers, by those without a page.

The swarm is `noloco swarm` as it ships: six nodes, and the page's process beside them on the same cores. A viewer is
an open stream of what changes, as a browser has it, read by this process; what a browser draws is not in it. Runs
alternate, and ratios are of medians over the repeats: `one_viewer`, `twenty_viewers`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from statistics import median

from reporting.report import Report, arguments_of, parser_of, run
from swarm import rate_of

NAMES = {1: "one", 2: "two", 20: "twenty"}


def look(address: str) -> None:
    """Read the stream until it ends."""
    with (
        suppress(OSError),
        urllib.request.urlopen(f"{address}live") as stream,
    ):  # it breaks off with the swarm
        while stream.read(4096):
            pass


def trained(steps: int, viewers: int) -> float:
    """Tokens per second while so many look; without a page when nobody does."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-m", "bootstrap.tools_cli", "swarm", "--steps", str(steps), "--dir", f"{directory}/run",
            "--summary", f"{directory}/summary.json", "--validation-sequences", "8", "--device", "cpu",
            *(() if viewers else ("--dashboard", "none")),
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"See it at (http://\S+/)", line):
                    for _ in range(viewers):
                        threading.Thread(target=look, args=(found[1],), daemon=True).start()
        if process.returncode:
            raise RuntimeError(f"the swarm ended with {process.returncode}")
        return rate_of(Path(directory, "run"))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 20], choices=sorted(NAMES))
    arguments = arguments_of(parser, repeats=1, steps=60, viewers=[1, 2])
    report = Report("watching", arguments.json)
    rates: dict[int, list[float]] = {viewers: [] for viewers in (0, *arguments.viewers)}
    for repeat in range(arguments.repeats):
        order = list(rates)
        for viewers in order[repeat % len(order) :] + order[: repeat % len(order)]:
            rates[viewers].append(trained(arguments.steps, viewers))
            report.tell_row({"viewers": viewers, "tokens_per_second": round(rates[viewers][-1])})
    without = median(rates[0])
    ratios = {
        f"{NAMES[viewers]}_viewer{'s' if viewers > 1 else ''}": round(median(rates[viewers]) / without, 4)
        for viewers in arguments.viewers
    }
    results = [{"viewers": viewers, "tokens_per_second": found} for viewers, found in rates.items()]
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
