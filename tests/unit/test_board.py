"""The board behind the dashboard: what a reader has missed, what is kept, and what strangers cannot do to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from bootstrap.dashboard.board import (
    MOST_MEMBERS,
    MOST_PICTURES,
    MOST_POINTS,
    Board,
    BoardUpdate,
    Measured,
    facts_of,
)
from bootstrap.dashboard.link_matrix import MOST_MEMBERS as MOST_IN_A_MATRIX
from bootstrap.dashboard.link_matrix import matrix_of
from bootstrap.dashboard.recalling import recalled
from bootstrap.dashboard.rows import asked_next, sent_per_second
from bootstrap.dashboard.wording import Wording
from bootstrap.inspect.observer import Sighting
from node.membership.view import Member
from node.watch.history import Thinned
from protocol.ground import PeerId
from protocol.messages.peers import HistoryPoint, NodeStats
from protocol.records.announcement import PEER_CHARACTERS, Announcement, LinkReport
from protocol.records.identity import Identity
from protocol.run.manifest import load_preset

TINY = load_preset("tiny")
PEERS = [Identity.from_seed("board", number).peer_id for number in range(4)]


def board() -> Board:
    return Board(facts_of(TINY, "run"), Wording(TINY.stages, version="1"))


def sighting(peer: PeerId, stage: int = 0, since: float = 0.0, **numbers: Any) -> Sighting:
    stats = NodeStats(
        **{"stage": stage, "state": "serving", "step": 1, "round": 0, "version": "1", **numbers}
    )
    return Sighting(Member(peer, Announcement(stage=stage, state="serving", since=since), 1e12), stats)


def kept_by_a_reader(rows: dict[str, Mapping[str, Any]], change: BoardUpdate) -> None:
    """What the page does with a change."""
    if change["whole"]:
        rows.clear()
    for peer in change["gone"]:
        rows.pop(peer, None)
    rows.update({row["id"]: row for row in change["rows"]})


def test_a_reader_that_gets_changes_knows_what_one_that_comes_anew_knows() -> None:
    seen, rows, version = board(), dict[str, Mapping[str, Any]](), 0
    for now in range(1, 31):
        for number, peer in enumerate(PEERS):
            if (now + number) % 5:  # each is gone now and then
                seen.see(sighting(peer, number % 2, step=now * number), now)
        seen.keep_only([peer for number, peer in enumerate(PEERS) if (now + number) % 5], now)
        seen.conclude(now)
        if now % 3 == 0:
            change = seen.change_since(version)
            kept_by_a_reader(rows, change)
            version = change["version"]
            fresh = dict[str, Mapping[str, Any]]()
            kept_by_a_reader(fresh, seen.change_since(0))
            assert rows == fresh
            assert set(rows) == {row["id"] for row in seen.rows()}
    assert not seen.change_since(version)["rows"]


def test_only_what_changed_is_told() -> None:
    seen = board()
    for peer in PEERS:
        seen.see(sighting(peer), 1.0)
    seen.conclude(1.0)
    version = seen.change_since(0)["version"]
    for peer in PEERS:
        seen.see(sighting(peer, step=9 if peer == PEERS[2] else 1), 2.0)
    change = seen.change_since(version)
    assert [row["id"] for row in change["rows"]] == [PEERS[2]]
    assert not change["whole"]


@pytest.mark.parametrize("version", [-1, 10**9])
def test_a_reader_of_another_life_of_the_dashboard_gets_everything(version: int) -> None:
    seen = board()
    seen.see(sighting(PEERS[0]), 1.0)
    change = seen.change_since(version)
    assert change["whole"]
    assert len(change["rows"]) == 1


def test_joins_silences_and_leaves_are_told_with_their_times() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], since=40.0), 100.0)
    seen.see(sighting(PEERS[0]), 101.0, silent=100.5)
    seen.see(sighting(PEERS[0]), 102.0)
    seen.see(sighting(PEERS[0], stage=1), 103.0)
    seen.keep_only([], 104.0)
    told = [(h.time, h.kind, h.stage) for h in seen.change_since(0)["happenings"]]
    assert told == [
        (40.0, "joined", 0),
        (101.0, "silent", 0),
        (102.0, "back", 0),
        (103.0, "moved", 1),
        (104.0, "left", 1),
    ]


def test_nobody_joins_in_the_future() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], since=1e15), 100.0)
    assert seen.change_since(0)["happenings"][0].time == 100.0


def test_one_liar_moves_no_curve() -> None:
    seen = board()
    for peer, loss in zip(PEERS, (2.0, 2.1, 2.2, 1e300), strict=True):
        seen.see(sighting(peer, 1, loss=loss), 1.0)
    seen.conclude(1.0)
    assert seen.now.loss == pytest.approx(2.15)


def test_what_is_kept_stays_bounded_over_weeks() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], loss=2.0), 0.0)
    for now in range(0, 3 * MOST_POINTS):
        seen.conclude(float(now))
    change = seen.change_since(0)
    assert MOST_POINTS / 2 <= len(change["points"]) <= MOST_POINTS
    assert change["points"][0].time == 0.0
    assert change["points"][-1].time > 2.9 * MOST_POINTS
    count, first, last = change["pictures"]
    assert MOST_PICTURES / 2 <= count <= MOST_PICTURES
    assert (first, last) == (0.0, pytest.approx(3 * MOST_POINTS, rel=0.02))


def test_a_picture_shows_what_was() -> None:
    seen = board()
    for now in range(0, 40, 4):
        seen.see(sighting(PEERS[0], step=now), now)
        seen.conclude(now)
    picture = json.loads(seen.picture(17.0) or "null")
    assert (picture["time"], picture["rows"][0]["step"]) == (16, 16)
    assert board().picture(17.0) is None


def test_made_up_members_cannot_fill_the_memory() -> None:
    seen = board()
    for number in range(MOST_MEMBERS + 50):
        seen.see(sighting(PeerId(f"peer {number}")), 1.0)
    assert len(seen.rows()) == MOST_MEMBERS


def test_a_word_that_no_node_says_is_not_passed_on() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], state="<img src=x onerror=alert(1)>"), 1.0)
    assert seen.rows()[0]["state"] == "unknown"


def test_the_verdict_tells_for_how_long_a_stage_has_been_empty() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], 0), 10.0)
    seen.conclude(10.0)
    seen.conclude(42.0)
    assert any(r.level == "alarm" and "stage 1: nobody for 32 s" in r.text for r in seen.remarks)
    seen.see(sighting(PEERS[1], 1), 50.0)
    seen.conclude(50.0)
    assert not any(r.level == "alarm" for r in seen.remarks)


def test_a_finding_has_the_time_at_which_it_was_first_seen_while_its_numbers_change() -> None:
    seen = board()
    seen.see(sighting(PEERS[0], 0), 10.0)
    for now in (10.0, 42.0):
        seen.conclude(now)
    assert [r.since for r in seen.remarks if "stage 1: nobody for 32 s" in r.text] == [10.0]
    seen.see(sighting(PEERS[1], 1), 50.0)
    seen.conclude(50.0)
    seen.keep_only([PEERS[0]], 60.0)
    seen.conclude(60.0)
    assert [r.since for r in seen.remarks if "stage 1: nobody" in r.text] == [60.0]


def test_the_time_left_is_that_of_the_steps_that_are_left_and_of_a_run_that_stands_still_unknown() -> None:
    seen = board()
    tokens = TINY.inner.microbatches * TINY.tokens_per_microbatch
    step = TINY.inner.total_steps - 600
    for stage in range(TINY.stages):
        seen.see(sighting(PEERS[stage], stage, step=step, tokens_per_second=2.0 * tokens), 10.0)
    seen.conclude(10.0)
    assert seen.change_since(0)["left"] == pytest.approx(300.0)
    assert json.loads(seen.picture(10.0) or "null")["left"] == pytest.approx(300.0)
    seen.keep_only(PEERS[:1], 20.0)
    seen.conclude(20.0)
    assert seen.change_since(0)["left"] is None


def test_who_has_left_is_still_called_by_name() -> None:
    seen, record = board(), Announcement(stage=0, state="serving", since=0.0, name="anna")
    seen.see(Sighting(Member(PEERS[0], record, 1e12), None), 1.0)
    seen.keep_only([], 2.0)
    assert [(h.kind, h.name) for h in seen.change_since(0)["happenings"]] == [
        ("joined", "anna"),
        ("left", "anna"),
    ]


def test_losses_that_were_measured_apart_go_out_once() -> None:
    seen = board()
    measured = Measured(held_out=True, points=[(1.0, 0, 5.5)], bigram=2.45)
    seen.note_measured(measured)
    version = seen.change_since(0)["version"]
    assert seen.change_since(0)["measured"] == measured
    seen.note_measured(dict(measured))  # type: ignore[arg-type]
    assert seen.change_since(version)["measured"] is None


def test_curves_from_before_come_first() -> None:
    early, late = board(), board()
    for seen, start in ((early, 0), (late, 100)):
        seen.see(sighting(PEERS[0], loss=2.0), start)
        for now in range(start, start + 20, 2):
            seen.conclude(now)
    version = late.version
    for _ in range(2):  # what another member tells replaces it
        late.recall(early.change_since(0)["points"])
    change = late.change_since(version)
    assert change["whole"]
    assert [point.time for point in change["points"]] == [*range(0, 20, 2), *range(100, 120, 2)]
    late.conclude(200.0)
    assert [point.time for point in late.change_since(change["version"])["points"]] == [200.0]


def test_what_members_tell_of_the_past_adds_up_and_one_liar_moves_no_loss() -> None:
    def history(stage: int, rate: float, loss: float | None, start: int = 0) -> list[HistoryPoint]:
        return [HistoryPoint(t, stage, int(rate * t), rate, loss, 1e-3, 1e-3) for t in range(start, 1000, 10)]

    points = recalled(
        {
            PEERS[0]: history(0, 100.0, None),
            PEERS[1]: history(0, 50.0, None, start=500),
            PEERS[2]: history(1, 150.0, 2.0),
            PEERS[3]: [*history(1, 150.0, 2.0)[:40], HistoryPoint(1e12, 1, 2**62, 1e300, 1e300, None, None)],
        },
        now=1000.0,
    )
    assert points == sorted(points)
    assert points[-1].time < 1000.0
    assert {point.loss for point in points} == {2.0}
    early, late = points[len(points) // 4], points[-1]
    assert (early.rate, early.members) == (100.0, 3)
    assert (late.rate, late.members) == (150.0, 3)
    assert late.tokens == pytest.approx(150 * 990, rel=0.02)
    assert recalled({PEERS[0]: []}, 1000.0) == []


# --- rows and links -----------------------------------------------------------------------------


def test_whom_one_sends_to_is_what_was_sent_since_the_last_answer() -> None:
    before = sighting(PEERS[0], sent={PEERS[1]: 10, PEERS[2]: 5}).stats
    now = sighting(PEERS[0], sent={PEERS[1]: 16, PEERS[2]: 5, PEERS[3]: 2}).stats
    assert now is not None
    assert sent_per_second(before, now, 2.0) == {PEERS[1]: 3.0, PEERS[3]: 1.0}
    assert sent_per_second(None, now, 2.0) == {}


def test_who_was_asked_longest_ago_is_asked_first() -> None:
    asked = dict(zip(PEERS, (5.0, 1.0, 9.5, 3.0), strict=True))
    assert asked_next(asked, 10.0, pause=1.0, most=2) == [PEERS[1], PEERS[3]]
    assert PEERS[2] not in asked_next(asked, 10.0, pause=1.0, most=9)


@pytest.mark.parametrize("members", [3, MOST_IN_A_MATRIX + 1])
def test_links_are_shown_between_members_or_else_between_stages(members: int) -> None:
    peers = sorted(Identity.from_seed("matrix", number).peer_id for number in range(members))
    seen = [
        sighting(peer, number % 2, links=[LinkReport(peers[number - 1][-PEER_CHARACTERS:], 0.04, 1e6)])
        for number, peer in enumerate(peers)
    ]
    matrix = matrix_of(seen)
    size = members if members == 3 else 2
    assert matrix["by"] == ("member" if members == 3 else "stage")
    for kind, value in (("ms", 20.0), ("mbit", 8.0)):
        rows: Any = matrix[kind]
        assert len(rows) == len(rows[0]) == size
        assert {cell for row in rows for cell in row if cell is not None} == {value}


def test_what_is_thinned_stays_in_order_and_evenly_spaced() -> None:
    thinned = Thinned[int](10)
    for time in range(1000):
        thinned.add(float(time), time)
    times = [time for time, _ in thinned.all()]
    assert times[0] == 0
    gaps = {late - early for early, late in pairwise(times)}
    assert max(gaps) <= 2 * min(gaps)
    assert not thinned.add(500.0, 500)
    assert thinned.at(-1.0) == (0.0, 0)
