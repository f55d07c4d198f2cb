"""What nodes report of their links, as matrices, as a table and as a scenario."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bootstrap.inspect.link_map import (
    LinkMap,
    MappedNode,
    link_map,
    scenario_of,
    seen_from_outside,
    table_of,
    write_scenario,
)
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.table import Picture, headline
from bootstrap.lab.placement.scenario import read_scenario
from node.membership.view import Member
from protocol.errors import StateError
from protocol.ground import PeerId
from protocol.messages.peers import NodeStats
from protocol.records.announcement import Announcement, LinkReport
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset

TINY = load_preset("tiny")
A, B, C = sorted(Identity.from_seed("link map", number).peer_id for number in range(3))


def report(peer: PeerId, round_trip: float, *bandwidth: float) -> LinkReport:
    return LinkReport(peer[-16:], round_trip, *bandwidth)


def three() -> LinkMap:
    """A and C of stage 0, B of stage 1; B and C have not measured each other."""
    return link_map(
        [
            MappedNode(B, 1, [report(A, 0.03, 2e6, 0.2)], 4.0),
            MappedNode(A, 0, [report(B, 0.04, 1e6, 0.1), report(C, 0.1)], 3.0, "ann"),
            MappedNode(
                C, 0, [report(A, 0.1, 5e6, 0.3), report(PeerId("x" * 16), 0.1), report(C, 0.1, 1e6, 0.1)]
            ),
        ]
    )


def test_matrices_are_by_stage_and_peer_and_leave_out_strangers() -> None:
    found = three()
    assert found.peers == (A, C, B)
    assert found.stages == (0, 0, 1)
    unknown = math.nan
    np.testing.assert_allclose(
        found.latency_s, [[unknown, 0.05, 0.02], [0.05, unknown, unknown], [0.02, unknown, unknown]]
    )
    np.testing.assert_allclose(
        found.bandwidth, [[unknown, unknown, 1e6], [5e6, unknown, unknown], [2e6, unknown, unknown]]
    )
    assert found.measured == 2
    assert found.pairs == 3


def test_who_claims_to_be_near_is_not_believed_alone() -> None:
    found = link_map([MappedNode(A, 0, [report(B, 0.2)]), MappedNode(B, 0, [report(A, 0.001)])])
    assert found.latency_s[0, 1] == found.latency_s[1, 0] == 0.1


def test_the_planner_reads_the_scenario_and_estimates_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    contents = scenario_of(three(), TINY)
    write_scenario(file, contents)
    assert json.loads(file.read_text())["latency_ms"][1] == [50.0, 0.0, None]
    assert json.loads(file.read_text())["bandwidth_gbps"][0] == [0.0, None, 0.008]
    assert "throughput" not in contents, "one of the nodes did not tell"
    scenario = read_scenario(file)
    assert scenario.estimated == 1
    assert scenario.latency[0, 1] == pytest.approx(0.05)
    assert scenario.bandwidth[0, 2] == pytest.approx(8 * 1.5e6)
    assert scenario.data_parallel_bytes > 0
    assert scenario.pipeline_bytes > 0


def test_throughput_is_what_a_node_could_do_all_the_time() -> None:
    stats = NodeStats(
        stage=0,
        state="serving",
        step=0,
        round=0,
        tokens_per_second=float(TINY.tokens_per_microbatch),
        recent_compute_fraction=0.5,
        links=[report(B, 0.1, 1e6, 0.1)],
    )
    record = Announcement(stage=0, state="serving", since=0.0, links=[report(A, 0.1)])
    seen = seen_from_outside(
        [Sighting(Member(A, record, 1e12), stats), Sighting(Member(B, record, 1e12), None)], TINY
    )
    assert seen[0].throughput == pytest.approx(2.0)
    assert seen[0].links == stats.links
    assert math.isnan(seen[1].throughput)
    assert seen[1].links == record.links, "of a node that does not answer, its record counts"


def test_the_table_shows_medians_and_the_nearest() -> None:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(table_of(three(), "tiny"))
    lines = console.export_text().splitlines()
    assert "2 of 3 pairs measured" in lines[0]
    row = next(line for line in lines if line.startswith("ann"))
    assert row.split() == ["ann", "0", "2", "35.0", f"…{B[-8:]}", "20.0", "8.0", "10%"]
    console.print(table_of(link_map([MappedNode(A, 0, [])]), "tiny"))
    assert "0 of 0 pairs" in console.export_text()


def test_a_scenario_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="Name another --out"):
        write_scenario(tmp_path / "missing" / "scenario.json", {})


def test_status_shows_the_median_round_trip_when_there_is_one() -> None:
    record = Announcement(stage=0, state="serving", since=0.0)
    stats = NodeStats(stage=0, state="serving", step=0, round=0, links=[report(B, 0.1), report(C, 0.3)])
    sighting = Sighting(Member(A, record, 1e12), stats)
    assert "round trip 200 ms" in headline(Picture("a run", 1.0, [sighting], expected=1))
    assert "round trip" not in headline(Picture("a run", 1.0, [], expected=1))
