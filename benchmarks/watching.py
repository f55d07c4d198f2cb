"""What the page costs a swarm that trains: tokens per second with viewers, by those without a page.

The swarm is `noloco swarm` as it ships: six nodes, and the page's process beside them on the same cores. A viewer is
an open stream of what changes, as a browser has it, read by this process; what a browser draws is not in it. The page
and its p2pd are held and let go in turn, `--window` seconds each, in one run: so a machine that is slower now than a
minute ago slows both. Ratios are geometric means over neighbouring windows, with 95 % intervals: `one_viewer`,
`twenty_viewers`. What the page does before all nodes train, its start, is left out.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import psutil
from reporting.report import Report, arguments_of, parser_of, run

from bootstrap.lab.simulation.study import interval
from bootstrap.local.page import NICENESS

NAMES = {0: "no", 1: "one", 2: "two", 20: "twenty"}
SETTLING = 0.1  # of a window, after a switch, that counts for neither side
FIRST_STEPS = 20  # of each node, before anything counts


class Window(NamedTuple):
    begin: float
    end: float
    is_watched: bool


def look(address: str) -> None:
    """Read the stream until it ends."""
    with (
        suppress(OSError),
        urllib.request.urlopen(f"{address}live") as stream,
    ):  # it breaks off with the swarm
        while stream.read(4096):
            pass


def page_of(swarm: int) -> list[psutil.Process]:
    """The page's process and its p2pd: what computes after the nodes."""
    found = []
    for process in psutil.Process(swarm).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.nice() >= psutil.Process().nice() + NICENESS:
                found.append(process)
    return found


def switch(swarm: int, seconds: float, windows: list[Window], trains: threading.Event) -> None:
    """Hold the page and let it go in turn, while the swarm trains."""
    is_watched = True
    while trains.is_set():
        begin = time.time()
        time.sleep(seconds)
        windows.append(Window(begin + SETTLING * seconds, time.time(), is_watched))
        is_watched = not is_watched or not trains.is_set()
        with suppress(psutil.NoSuchProcess):
            for process in page_of(swarm):
                process.send_signal(signal.SIGCONT if is_watched else signal.SIGSTOP)


def trained(steps: int, viewers: int, seconds: float) -> list[float]:
    """Tokens with so many viewers by those without a page, of each two neighbouring windows."""
    windows, trains = list[Window](), threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-m", "bootstrap.tools_cli", "swarm",
            "--steps", str(steps), "--state-dir", f"{directory}/run",
            "--validation-sequences", "8", "--device", "cpu",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"See it at (http://\S+/)", line):
                    for _ in range(viewers):
                        threading.Thread(target=look, args=(found[1],), daemon=True).start()
                elif re.search(r"(\d+)/\1 alive", line) and not trains.is_set() and not windows:
                    trains.set()
                    threading.Thread(target=switch, args=(process.pid, seconds, windows, trains)).start()
                elif re.search("Training (is complete|stopped)", line):
                    trains.clear()
        trains.clear()
        if process.returncode:
            raise RuntimeError(f"the swarm ended with {process.returncode}")
        return ratios_of(steps_of(Path(directory, "run")), windows)


def steps_of(directory: Path) -> list[float]:
    """When the nodes of the first stage ended their steps, while all of them trained."""
    steps = list[list[float]]()
    for file in directory.glob("s0r*/events.jsonl"):
        events = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        steps.append([event["time"] for event in events if event["event"] == "step"])
    first, last = max(times[FIRST_STEPS - 1] for times in steps), min(times[-1] for times in steps)
    return sorted(time for times in steps for time in times if first < time <= last)


def ratios_of(steps: Sequence[float], windows: Sequence[Window]) -> list[float]:
    """Steps per second while it is watched by those while it is not, of each two neighbouring windows."""
    whole = [window for window in windows if steps[0] <= window.begin and window.end <= steps[-1]]
    rates = [sum(w.begin < step <= w.end for step in steps) / (w.end - w.begin) for w in whole]
    found = []
    for i in range(2, len(whole) - 1, 2):  # in the first two the nodes have just begun
        pair = {whole[j].is_watched: rates[j] for j in (i, i + 1)}
        if min(pair.values()) > 0:
            found.append(pair[True] / pair[False])
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--window", type=float, default=3.0, help="seconds")
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 20], choices=sorted(NAMES))
    arguments = arguments_of(parser, steps=80, window=0.5, viewers=[1, 2])
    report = Report("watching", arguments.json)
    ratios, results = dict[str, float](), []
    for viewers in arguments.viewers:
        found = [math.log(ratio) for ratio in trained(arguments.steps, viewers, arguments.window)]
        name = f"{NAMES[viewers]}_viewer{'' if viewers == 1 else 's'}"
        ratios[name] = round(math.exp(mean(found)), 4)
        results.append({"viewers": viewers, "pairs": len(found), "within": interval(found)})
        report.tell_row({"viewers": viewers, "ratio": ratios[name], **results[-1]})
    report.conclude(ratios, results)


if __name__ == "__main__":
    run(main)
