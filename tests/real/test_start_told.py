"""Real nodes on a terminal's other end: every second of their start is explained, and nothing else is said."""

from __future__ import annotations

import itertools
import re
import signal
from datetime import datetime
from pathlib import Path

import pytest

from tests.real.daemons import NodeDaemon, SeedDaemon

LONGEST_SILENCE = 8  # seconds: four, and what two busy cores add
DEBRIS = ("Warning", "Traceback", '{"', "asyncio", "Task ")


@pytest.mark.timeout(400)
def test_a_start_is_explained_and_an_end_says_what_came_of_it(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    first = NodeDaemon(tmp_path / "a", "--join", address, "--stage", "0")
    first.wait_for("Waiting for the first step")
    second = NodeDaemon(tmp_path / "b", "--join", address, "--stage", "1")
    for node in (first, second):
        node.wait_for(r"Began to train after \S+ s: .*loading torch \S+ s")
    first.wait_for_step(20)
    for node in (second, first):
        assert node.leave() == 0
        told = node.output
        assert all(phase in told for phase in ("Dialling 1 address", "Measuring memory", "Getting the state"))
        assert longest_silence(told.partition("Began to train")[0]) <= LONGEST_SILENCE, told
        assert not [word for word in DEBRIS if word in told], told
        assert re.search(r"gave \S+ tokens in \d+ rounds. Start it again: noloco-node --state-dir=\S+", told)
    assert "nobody serves stage 1 yet" in first.output or "Stage 1 is served again." in first.output
    again = re.findall(r"Start it again: noloco-node (.*)", first.output)[-1].split()
    assert not [argument for argument in again if argument.startswith("--join")]
    seed.signal(signal.SIGINT)


def longest_silence(output: str) -> int:
    """Seconds between two lines."""
    times = [datetime.strptime(at, "%H:%M:%S") for at in re.findall(r"^\d\d:\d\d:\d\d", output, re.M)]
    return max((later - earlier).seconds for earlier, later in itertools.pairwise(times))
