"""What people see of how busy the nodes are, also of those that do not tell."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.table import Picture, render
from bootstrap.local.summary import Summary
from node.membership.view import Member
from protocol.announcement import Announcement
from protocol.errors import WireError
from protocol.identity import Identity
from protocol.messages.peers import NodeStats

PEER = Identity.from_seed("table").peer_id


def stats(**numbers: Any) -> NodeStats:
    return NodeStats(stage=0, state="serving", step=7, round=1, **numbers)


def shown(numbers: NodeStats) -> str:
    record = Announcement(
        stage=0, state="serving", since=0.0, step=7, round=1, loss=None, tokens_per_second=0.0, addresses=[]
    )
    sighting = Sighting(Member(PEER, record, 1e12), numbers)
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(render(Picture("a run", 1.0, [sighting], expected=1)))
    return console.export_text()


def test_the_busy_column_is_of_the_last_minute() -> None:
    text = shown(stats(compute_fraction=0.5, recent_compute_fraction=0.874))
    assert "busy" in text
    assert "87%" in text


def test_a_node_that_does_not_tell_gets_a_dash() -> None:
    row = next(line for line in shown(stats(loss=1.0)).splitlines() if PEER[-8:] in line)
    assert " - " in row
    assert "%" not in row


def test_the_summary_means_over_the_replicas_that_tell() -> None:
    summary = Summary(validation_loss=[(0, 0.0, 5.0)])
    for number, fraction in enumerate([0.5, 0.7, None]):
        summary.add_node(f"s0r{number}", PEER, stats(compute_fraction=fraction), {})
    assert any(line.startswith("computing        stage 0 60% of") for line in summary.lines())
    assert summary.nodes["s0r2"]["compute_fraction"] is None


@pytest.mark.parametrize("field", ["compute_fraction", "recent_compute_fraction"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "much"])
def test_a_fraction_out_of_bounds_is_malformed(field: str, value: object) -> None:
    body = stats().model_dump() | {field: value}
    with pytest.raises(WireError, match=field):
        NodeStats.parsed(body)
