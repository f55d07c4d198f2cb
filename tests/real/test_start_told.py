"""Real nodes whose output is a file: every phase of their start is told, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node.watch.waiting import REPEATS
from tests.patience import patience
from tests.real.daemons import Daemon, NodeDaemon, SeedDaemon
from tests.real.line_times import LineTimes
from tests.real.local_swarm import swarm_command

# seconds: a phase is told as it begins and after the first of REPEATS, one until that is looked at, and what two busy
# cores add
LONGEST_SILENCE = patience(REPEATS[0] + 2.0)
DEBRIS = ("Warning", "Traceback", '{"', "asyncio", "Task ")


@pytest.mark.timeout(400)
def test_a_start_is_explained_and_an_end_says_what_came_of_it(tmp_path: Path) -> None:
    seed = SeedDaemon(tmp_path / "run", "--preset", "tiny")
    address = seed.join_address()
    with LineTimes(tmp_path / "a" / "output.log") as of_first:
        first = NodeDaemon(tmp_path / "a", "--join", address, "--stage", "0")
        first.wait_for("Missing before anything is trained")
        with LineTimes(tmp_path / "b" / "output.log") as of_second:
            second = NodeDaemon(tmp_path / "b", "--join", address, "--stage", "1")
            for node in (first, second):
                node.wait_for(r"Began to train after \S+ s: .*loading torch \S+ s")
            first.wait_for_step(20)
    # what the first waits for is another person: said once, and again after 10 s and 30 s
    for node, lines, until in (
        (second, of_second, "Began to train"),
        (first, of_first, "Missing before anything"),
    ):
        assert node.leave() == 0
        told = node.output
        phases = ("dialling 1 address", "measuring memory", "getting the state")
        assert [phase for phase in phases if phase not in told.lower()] == []
        gap, ended_by = lines.longest_gap(until)
        assert gap <= LONGEST_SILENCE, f"{gap:.1f} s until {ended_by!r}:\n{lines}"
        assert not [word for word in DEBRIS if word in told], told
        assert re.search(r"gave \S+ tokens in \d+ rounds. Start it again: noloco join --state-dir=\S+", told)
    assert re.search(
        "nobody serves stage 1 yet|Stage 1 is served again|No live peer serves stage 1", first.output
    )
    again = re.findall(r"Start it again: noloco join (.*)", first.output)[-1].split()
    assert not [argument for argument in again if argument.startswith("--join")]
    assert seed.leave() == 0


@pytest.mark.timeout(400)
def test_a_local_swarm_is_never_silent_for_long_until_it_trains(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    with LineTimes(log) as lines:
        swarm = Daemon(swarm_command(tmp_path, "--validation-sequences", "8"), log)
        swarm.wait_for(r" [1-9][\d,]* tokens", patience(180))
    assert swarm.leave(100) == 130, swarm.output
    gap, ended_by = lines.longest_gap(until=" alive")
    assert gap <= LONGEST_SILENCE, f"{gap:.1f} s until {ended_by!r}:\n{lines}"
