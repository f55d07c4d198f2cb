"""Real nodes on a terminal's other end: every second of their start is explained, and nothing else is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.patience import patience
from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon
from tests.real.line_times import LineTimes
from tests.real.local_swarm import swarm_command

LONGEST_SILENCE = patience(5.0)  # seconds: three, one until that is looked at, and what two busy cores add
DEBRIS = ("Warning", "Traceback", '{"', "asyncio", "Task ")


@pytest.mark.timeout(400)
def test_a_start_is_explained_and_an_end_says_what_came_of_it(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    with LineTimes(tmp_path / "a" / "output.log") as of_first:
        first = NodeDaemon(tmp_path / "a", "--join", address, "--stage", "0")
        first.wait_for("Waiting for the first step")
        with LineTimes(tmp_path / "b" / "output.log") as of_second:
            second = NodeDaemon(tmp_path / "b", "--join", address, "--stage", "1")
            for node in (first, second):
                node.wait_for(r"Began to train after \S+ s: .*loading torch \S+ s")
            first.wait_for_step(20)
    for node, lines in ((second, of_second), (first, of_first)):
        assert node.leave() == 0
        told = node.output
        assert all(phase in told for phase in ("Dialling 1 address", "Measuring memory", "Getting the state"))
        gap, ended_by = lines.longest_gap(until="Began to train")
        assert gap <= LONGEST_SILENCE, f"{gap:.1f} s until {ended_by!r}:\n{lines}"
        assert not [word for word in DEBRIS if word in told], told
        assert re.search(r"gave \S+ tokens in \d+ rounds. Start it again: noloco join --state-dir=\S+", told)
    assert "nobody serves stage 1 yet" in first.output or "Stage 1 is served again." in first.output
    again = re.findall(r"Start it again: noloco join (.*)", first.output)[-1].split()
    assert not [argument for argument in again if argument.startswith("--join")]
    assert seed.leave() == 0


@pytest.mark.timeout(400)
def test_a_local_swarm_says_something_at_least_every_five_seconds_until_it_trains(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    with LineTimes(log) as lines:
        swarm = Daemon(swarm_command(tmp_path, "--validation-sequences", "8"), log)
        swarm.wait_for(r" [1-9][\d,]* tokens", patience(180))
    assert swarm.leave(100) == 130, swarm.output
    gap, ended_by = lines.longest_gap(until=" alive")
    assert gap <= LONGEST_SILENCE, f"{gap:.1f} s until {ended_by!r}:\n{lines}"
