"""What a stranger tells of itself breaks neither the terminal nor the page, whatever numbers and texts it takes."""

from __future__ import annotations

import io
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bootstrap.dashboard.board import MOST_MEMBERS, Board, facts_of
from bootstrap.dashboard.metrics import exposition
from bootstrap.dashboard.recalling import LONGEST, recalled
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Sighting
from bootstrap.inspect.seen import Seen
from bootstrap.inspect.status import RunStatus, as_json, shown
from bootstrap.inspect.table import MOST_ROWS
from node.membership.view import Member
from protocol.ground import MOST_COUNT, PeerId
from protocol.messages.peers import Awaited, History, HistoryPoint, LossBest, LossTrend, NodeStats
from protocol.records.announcement import Announcement
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset
from tests.unit.test_verdict import node, pairs

MANIFEST = load_preset("tiny")
LONGEST_LINE = 160
PEER = Identity.from_seed("awaited").peer_id

NUMBERS = st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e15, 1e200, 1.7e308])
SIGNED = NUMBERS | NUMBERS.map(lambda number: -number)
COUNTS = st.sampled_from([0, 1, 9, 2**31, 2**53, 2**63 - 1])
STEPS = st.sampled_from([0, 1, 9, 2**31, MOST_COUNT])
TEXTS = st.sampled_from(
    ["", "[/b]", "[bold red]x", "\x1b[2J", "\x1b]0;title\x07", "<script>alert(1)</script>", "9" * 256, "a\nb\r\tc",
     "999.999.999", "\u202eevil", "\x00", "é" * 200]
)  # fmt: skip


def strategy_of(name: str) -> st.SearchStrategy[Any]:
    """Anything that a message may have in this field."""
    if name == "state":
        return TEXTS | st.sampled_from(["serving", "joining", "finished"])
    if name in ("step", "round"):
        return STEPS
    if name in ("version", "device"):
        return TEXTS
    if name.endswith("_fraction"):
        return st.sampled_from([0.0, 1.0])
    if name == "trend":
        return st.none() | st.builds(LossTrend, NUMBERS, SIGNED, SIGNED, NUMBERS)
    if name == "best":
        return st.none() | st.builds(LossBest, SIGNED, SIGNED, NUMBERS)
    if name == "awaited":
        stages = st.sampled_from([0, 1, 2**63 - 1])
        return st.none() | st.builds(Awaited, stages, STEPS, st.sampled_from(["", PEER]), SIGNED, SIGNED)
    kinds = {
        type(None),
        *get_args(NodeStats.model_fields[name].annotation),
        NodeStats.model_fields[name].annotation,
    }
    if bool in kinds:
        return st.booleans()
    if int in kinds:
        return COUNTS
    return NUMBERS if name in SIZES else SIGNED


SIZES = {"step_age", "no_peer_seconds", "share_of_peak"}
LEFT = {"stage", "partners", "partner", "sent", "links"}  # peer ids and links are checked for themselves
FIELDS = [name for name in NodeStats.model_fields if name not in LEFT]
TOLD = st.fixed_dictionaries({}, optional={name: strategy_of(name) for name in FIELDS})


def on_a_terminal(sightings: list[Sighting]) -> str:
    status = RunStatus("0123", MANIFEST, Seen(MANIFEST.stages, sightings, version="0.1.0"))
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    console.print(shown(status, 150))
    json.dumps(as_json(status), allow_nan=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def board_of(sightings: list[Sighting]) -> Board:
    board = Board(facts_of(MANIFEST, "0123"), Wording(MANIFEST.stages, version="0.1.0"))
    for now in (1.0, 5.0):
        for sighting in sightings:
            board.see(sighting, now)
        board.conclude(now)
    return board


@given(st.lists(TOLD, min_size=1, max_size=3), st.sampled_from([0, 1]), st.booleans())
def test_no_answer_breaks_status_page_or_metrics(
    told: list[dict[str, Any]], stage: int, has_honest: bool
) -> None:
    sightings = [
        *(pairs(2) if has_honest else ()),
        *(node(stage, 5 + number, **each) for number, each in enumerate(told)),
    ]
    for sighting in sightings:
        assert sighting.stats is not None
        NodeStats.parsed(sighting.stats.model_dump())
    out = on_a_terminal(sightings)
    assert not [c for c in out if not c.isprintable() and c != "\n"]
    assert max(map(len, out.splitlines())) <= LONGEST_LINE
    board = board_of(sightings)
    assert all(len(remark.text) <= LONGEST_LINE for remark in board.remarks)
    json.dumps(board.change_since(0), allow_nan=False)
    exposition(board)


NOW = 1.7e9
TIMES = SIGNED | st.sampled_from([NOW - 1e6, NOW - 10.0, NOW - 1e-6])
POINTS = st.builds(HistoryPoint, TIMES, st.just(0), COUNTS, NUMBERS, SIGNED, SIGNED, SIGNED)


@given(st.lists(POINTS, max_size=4))
def test_no_history_breaks_the_curves(points: list[HistoryPoint]) -> None:
    histories = {PeerId(f"peer {number}"): History(points=points).points for number in range(2)}
    curves = recalled(histories, NOW)
    assert bool(curves) == any(NOW - LONGEST < point.time < NOW for point in points)
    json.dumps(curves, allow_nan=False)  # raises for what no page can read


def test_markup_is_shown_as_it_is() -> None:
    out = on_a_terminal([*pairs(2), node(1, 5, state="[bold]x[/]", device="[/b]")])
    assert "[bold]x[/]" in out
    assert "[/b]" in out


def test_one_that_lies_moves_no_verdict() -> None:
    """Of four that tell the loss, and of versions that nobody else has."""
    honest = pairs(2, trend=LossTrend(3600.0, 2.31, 2.28, 0.002))
    liar = node(1, 8, trend=LossTrend(3600.0, 1.0, 900.0, 0.0), version="999.0")
    kinds = {remark.text for remark in board_of([*honest, liar]).remarks}
    assert kinds == {"learning: 2.31 → 2.28 in the last hour"}


def claimed(number: int) -> Sighting:
    record = Announcement(stage=number % 2, state="serving", since=0.0)
    return Sighting(Member(Identity.from_seed("claimed", number).peer_id, record, 1e12), None)


@pytest.fixture(scope="module")
def crowd() -> list[Sighting]:
    return [claimed(number) for number in range(MOST_MEMBERS)]


def test_those_that_answer_are_seen_among_any_number_of_claims(crowd: list[Sighting]) -> None:
    honest = pairs(2)
    out = on_a_terminal([*crowd, *honest])
    assert all(sighting.member.peer[-8:] in out for sighting in honest)
    assert f"and {MOST_MEMBERS + len(honest) - MOST_ROWS:,} more" in out
    assert out.count("\n") < MOST_ROWS + 40
    board = board_of([*crowd, *honest])
    rows = {row["id"] for row in board.rows()}
    assert rows >= {sighting.member.peer for sighting in honest}
    assert len(rows) == MOST_MEMBERS


def test_a_node_of_a_later_version_that_tells_more_is_watched_all_the_same() -> None:
    stats = NodeStats(stage=1, state="serving", step=7, round=1)
    assert NodeStats.parsed(stats.model_dump() | {"told by version 2": [1, 2, {"x": 3}]}) == stats
