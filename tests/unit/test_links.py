"""Estimates of links from known samples, what is published of them, and how often others may ask."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from node.links.links import (
    FIRST_PROBE_BYTES,
    FRESH_SECONDS,
    LARGEST_NOISE,
    LEAST_PAUSE,
    LONG_TRANSFER,
    MOST_PEERS,
    RECENT,
    LinkEstimate,
    Links,
    median_round_trip,
    pause_after,
)
from node.links.probing import MOST_BYTES, MOST_PROBES, WINDOW_SECONDS, ProbeAllowance
from protocol.errors import RecordError, WireError
from protocol.ground import PeerId, Record
from protocol.messages.peers import MAX_PROBE_BYTES, NodeStats
from protocol.records.announcement import (
    AT_LEAST,
    MOST_PUBLISHED,
    MOST_TOLD,
    Announcement,
    LinkReport,
)
from protocol.records.records import MAX_RECORD_BYTES

MB = 1_000_000


def peer(number: int) -> PeerId:
    """Peers in the order of their numbers; base58 has no zero."""
    return PeerId("12D3KooW" + f"{number:044d}".translate(str.maketrans("0123456789", "ABCDEFGHJK")))


def link_of(*round_trips: float) -> LinkEstimate:
    link = LinkEstimate()
    for number, seconds in enumerate(round_trips):
        link.note_round_trip(seconds, float(number))
    return link


def known(links: Links, number: int, round_trip: float = 0.05, now: float = 0.0) -> LinkEstimate:
    link = links.visit(peer(number), now)
    link.note_round_trip(round_trip, now)
    return link


# --- round trips --------------------------------------------------------------------------------


def test_equal_round_trips_are_the_estimate() -> None:
    link = link_of(0.1, 0.1, 0.1)
    assert link.round_trip == pytest.approx(0.1)
    assert link.mean_round_trip == pytest.approx(0.1)
    assert link.deviation == 0.0


def test_a_busy_machine_does_not_make_the_link_look_long() -> None:
    link = link_of(0.1, 0.1, 0.1, 2.0)
    assert link.round_trip == pytest.approx(0.1)
    assert link.mean_round_trip > 0.5


def test_after_many_samples_the_mean_follows_the_rfc() -> None:
    link = link_of(*[0.1] * 20)
    link.note_round_trip(0.18, 20.0)
    assert link.mean_round_trip == pytest.approx(0.11)
    assert link.deviation == pytest.approx(0.02)


def test_a_longer_way_is_noticed_after_a_while() -> None:
    link = link_of(0.1, *[0.3] * RECENT)
    assert link.round_trip == pytest.approx(0.3)


# --- bandwidth ----------------------------------------------------------------------------------


def test_a_transfer_without_its_round_trip_is_the_bandwidth() -> None:
    link = link_of(0.1, 0.1)
    link.note_transfer(MB, 0.1 + 0.5, now=0.0)
    assert link.bandwidth == pytest.approx(2 * MB)
    assert 0 < link.uncertainty < AT_LEAST


@pytest.mark.parametrize("bandwidth", [0.1 * MB, 3 * MB, 40 * MB])
def test_noisy_transfers_come_near_the_truth(bandwidth: float) -> None:
    rng = random.Random(1)
    link = LinkEstimate()
    for number in range(40):
        link.note_round_trip(0.08 + rng.uniform(0, 0.004), float(number))
        link.note_transfer(MB, 0.08 + rng.uniform(0, 0.004) + MB / bandwidth, float(number))
    assert link.bandwidth is not None
    assert abs(math.log(link.bandwidth / bandwidth)) < 0.1
    assert link.uncertainty < 0.2


def test_other_traffic_pulls_less_than_a_free_link() -> None:
    link = link_of(0.1, 0.1)
    for number in range(60):  # every other transfer has half of the link
        link.note_transfer(MB, 0.1 + (1.0 if number % 2 else 0.5), float(number))
    assert link.bandwidth is not None
    assert link.bandwidth > 1.55 * MB
    assert link.uncertainty > 0.2


def test_a_transfer_as_short_as_the_jitter_tells_how_fast_the_link_is_at_least() -> None:
    link = link_of(*[0.1, 0.12] * 8)
    link.note_transfer(32 * 1024, 0.115, now=0.0)
    assert link.bandwidth is not None
    assert link.bandwidth < 32 * 1024 / link.deviation / LARGEST_NOISE
    assert link.uncertainty == AT_LEAST
    link.note_transfer(MB, 0.11 + 0.1, now=1.0)
    assert link.bandwidth == pytest.approx(10 * MB, rel=0.1)
    assert link.uncertainty < AT_LEAST


def test_overlapping_frames_are_one_transfer() -> None:
    """Each alone would seem two or three times slower, since it waits for those before it."""
    clock = Clock()
    links = Links()
    link = known(links, 0, 0.1)
    send(links, clock, [MB], 0.1)
    frames = [links.transfer(peer(0), "gossip", MB, clock) for _ in range(3)]
    for frame in frames:
        frame.__enter__()
    for number, frame in enumerate(frames):
        clock.now += 0.5 + (0.1 if number == 0 else 0.0)
        frame.__exit__(None, None, None)
    assert link.transfers == 1
    assert link.bandwidth == pytest.approx(2 * MB)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def send(links: Links, clock: Clock, sizes: list[int], seconds: float, fails: bool = False) -> None:
    for nbytes in sizes:
        try:
            with links.transfer(peer(0), "gossip", nbytes, clock):
                clock.now += seconds
                if fails:
                    raise TimeoutError
        except TimeoutError:
            pass


def test_the_first_on_a_stream_failures_and_small_frames_tell_nothing() -> None:
    clock, links = Clock(), Links()
    link = known(links, 0, 0.1)
    send(links, clock, [MB], 9.0)
    send(links, clock, [MB, MB], 9.0, fails=True)
    send(links, clock, [1000], 9.0)
    assert link.bandwidth is None
    send(links, clock, [MB], 0.6)
    assert link.bandwidth == pytest.approx(2 * MB)


def test_a_transfer_that_ends_before_any_round_trip_was_measured_tells_nothing() -> None:
    clock, links = Clock(), Links()
    frames = [links.transfer(peer(0), "gossip", LONG_TRANSFER, clock) for _ in range(2)]
    for frame in frames:
        frame.__enter__()
    for frame in frames:
        clock.now += 1.0
        frame.__exit__(None, None, None)
    link = links.of(peer(0))
    assert link is not None
    assert link.bandwidth is None


FINITE = st.floats(allow_nan=False, allow_infinity=False)
STREAMS = st.sampled_from(["gossip", "state"])
CALLS = st.one_of(
    st.tuples(st.just("note_round_trip"), FINITE, FINITE),
    st.tuples(st.just("note_transfer"), st.integers(), FINITE, FINITE),
    st.tuples(st.just("began"), STREAMS, FINITE),
    st.tuples(st.just("ended"), STREAMS, st.integers(min_value=0), FINITE),
)


@given(st.lists(CALLS, max_size=60))
@example([("note_transfer", 0, 0.0, 0.0)])
@example([("began", "gossip", 0.0), ("began", "gossip", 0.0), ("ended", "gossip", LONG_TRANSFER, 0.0)])
def test_whatever_is_noted_nothing_raises_and_what_is_told_is_finite(calls: list[tuple[Any, ...]]) -> None:
    links = Links()
    link = links.visit(peer(0), 0.0)
    for name, *arguments in calls:
        getattr(link, name)(*arguments)
        assert link.bandwidth is None or math.isfinite(link.bandwidth)
        assert math.isfinite(link.uncertainty)
        assert math.isfinite(link.typical_round_trip)
        assert math.isfinite(link.mean_round_trip)
        assert math.isfinite(link.deviation)
        assert links.bulk_bytes(peer(0), 0.0) >= 0
        for report in links.told():
            assert 0 <= report.round_trip <= 60
            assert report.bandwidth is None or 0 < report.bandwidth <= 1e12
            assert 0 <= report.uncertainty <= 10


def test_a_transfer_without_end_is_counted_meanwhile() -> None:
    clock, links = Clock(), Links()
    link = known(links, 0, 0.1)
    send(links, clock, [MB], 0.6)
    keeps_going = links.transfer(peer(0), "gossip", MB, clock)
    keeps_going.__enter__()
    send(links, clock, [MB] * (2 * LONG_TRANSFER // MB), 0.5)
    assert link.transfers >= 1
    assert link.bandwidth == pytest.approx(2 * MB, rel=0.1)


# --- whom to measure ----------------------------------------------------------------------------


def test_the_unknown_come_first_then_those_visited_longest_ago() -> None:
    links, rng = Links(), random.Random(0)
    everyone = [peer(number) for number in range(5)]
    order = []
    for now in range(10):
        chosen = links.choose(everyone, rng)
        assert chosen is not None
        links.visit(chosen, float(now))
        order.append(chosen)
    assert sorted(order[:5]) == everyone
    assert order[5:] == order[:5]
    assert order != everyone + everyone
    assert links.choose([], rng) is None


def test_memory_is_bounded_and_the_least_recently_used_go() -> None:
    links, rng = Links(), random.Random(0)
    everyone = [peer(number) for number in range(1000)]
    for now in range(400):
        chosen = links.choose(everyone, rng)
        assert chosen is not None
        links.visit(chosen, float(now)).note_round_trip(0.1, float(now))
    visited = [links.of(p) for p in everyone]
    assert sum(link is not None for link in visited) <= MOST_PEERS
    again = [link for link in visited if link is not None and link.round_trips > 1]
    assert len(again) > MOST_PEERS / 4, "those that are known are to be measured again as well"
    dropped = links.take_dropped()
    assert 0 < len(dropped) <= MOST_PEERS
    assert not any(links.of(p) for p in dropped)
    assert links.take_dropped() == []


def test_a_probe_of_the_bandwidth_is_bounded_and_not_needed_where_there_is_traffic() -> None:
    links = Links()
    assert links.bulk_bytes(peer(0), 0.0) == FIRST_PROBE_BYTES
    link = known(links, 0)
    link.note_transfer(MB, 0.05 + 10.0, 0.0)  # 100 kB/s
    assert links.bulk_bytes(peer(0), 0.0) == FIRST_PROBE_BYTES
    link.note_transfer(MB, 0.05 + 0.001, 0.0)
    link.note_transfer(MB, 0.05 + 0.001, 0.0)
    assert links.bulk_bytes(peer(0), FRESH_SECONDS - 1) == 0
    assert FIRST_PROBE_BYTES < links.bulk_bytes(peer(0), FRESH_SECONDS + 1) <= MAX_PROBE_BYTES


def test_probes_take_a_hundredth_of_a_link_and_one_in_ten_seconds() -> None:
    assert pause_after(0.0) == LEAST_PAUSE
    assert pause_after(0.5) == pytest.approx(50.0)


# --- what others see ----------------------------------------------------------------------------


def test_the_links_measured_last_are_published() -> None:
    links = Links()
    for number in range(20):
        known(links, number, 0.01 * (number + 1), float(number))
    links.visit(peer(99), 50.0)  # never answered
    assert len(links.told()) == 20
    assert [report.peer for report in links.published()] == [
        peer(number)[-16:] for number in range(19, 19 - MOST_PUBLISHED, -1)
    ]
    assert median_round_trip(links.told()) == pytest.approx(0.105)
    assert median_round_trip([]) is None


def test_whatever_was_measured_can_be_published() -> None:
    links = Links()
    for number, seconds in enumerate([0.0, 1e-9, 1e9]):
        for nbytes in (1, 10**12):
            known(links, number, seconds).note_transfer(nbytes, 1e-12 if nbytes > 1 else 1e9, 0.0)
    stats = NodeStats(stage=0, state="serving", step=0, round=0, links=links.told())
    assert len(NodeStats.model_validate(stats.model_dump()).links) == 3


def announcement(**changes: Any) -> dict[str, Any]:
    return Announcement(stage=0, state="serving", since=0.0).model_dump() | changes


def parsed(fields: dict[str, Any]) -> Announcement:
    return Announcement.read(Record(peer(0), msgpack.packb(fields), 0.0))


REPORT = LinkReport(peer(1)[-16:], 0.05, 2.5e6, 0.1)


def test_links_go_through_a_record_and_older_records_have_none() -> None:
    assert parsed(announcement(links=[REPORT, LinkReport(peer(2)[-16:], 0.1)])).links == [
        REPORT,
        LinkReport(peer(2)[-16:], 0.1),
    ]
    older = announcement()
    del older["links"]
    assert parsed(older).links == []
    full = msgpack.packb(announcement(links=[REPORT] * MOST_PUBLISHED, addresses=["a" * 256] * 8))
    assert len(full) < MAX_RECORD_BYTES / 4


BAD_LINKS: list[Any] = [
    None,
    "links",
    [None],
    ["x" * 16],
    [[]],
    [["x" * 16]],
    [["x" * 15, 0.1]],
    [["x" * 17, 0.1]],
    [[1, 0.1]],
    [["x" * 16, -0.1]],
    [["x" * 16, 61.0]],
    [["x" * 16, math.nan]],
    [["x" * 16, 0.1, 0.0]],
    [["x" * 16, 0.1, math.inf]],
    [["x" * 16, 0.1, 1e13]],
    [["x" * 16, 0.1, 1e6, -1.0]],
    [["x" * 16, 0.1, 1e6, math.nan]],
    [["x" * 16, 0.1, 1e6, 10.5]],
]


@pytest.mark.parametrize("links", [*BAD_LINKS, [list(REPORT)] * (MOST_PUBLISHED + 1)])
def test_malformed_links_in_a_record_are_refused(links: Any) -> None:
    with pytest.raises(RecordError):
        parsed(announcement(links=links))


@pytest.mark.parametrize("links", [*BAD_LINKS, [list(REPORT)] * (MOST_TOLD + 1)])
def test_malformed_links_in_an_answer_are_refused(links: Any) -> None:
    body = NodeStats(stage=0, state="serving", step=0, round=0).model_dump() | {"links": links}
    with pytest.raises(WireError, match="links"):
        NodeStats.parsed(body)


# --- how often others may ask -------------------------------------------------------------------


def test_there_is_enough_for_a_visit_at_once_and_for_one_a_window_after_it() -> None:
    allowance = ProbeAllowance()
    assert all(allowance.allows(peer(0), 0, 0.0) for _ in range(MOST_PROBES))
    assert not allowance.allows(peer(0), 0, 0.9 * WINDOW_SECONDS / MOST_PROBES)
    assert allowance.allows(peer(1), MAX_PROBE_BYTES, 0.0)
    assert allowance.allows(peer(1), MAX_PROBE_BYTES, 0.0)
    assert not allowance.allows(peer(1), 4, 0.0)
    assert not allowance.allows(peer(2), MAX_PROBE_BYTES + 4, 0.0)
    assert allowance.allows(peer(0), MAX_PROBE_BYTES, WINDOW_SECONDS)


@pytest.mark.parametrize("pause", [0.01, 0.3, 2.0])
def test_a_prober_without_end_gets_a_visit_a_window(pause: float) -> None:
    allowance, windows = ProbeAllowance(), 10
    answered = [
        nbytes
        for number in range(int(windows * WINDOW_SECONDS / pause))
        for nbytes in (0, MAX_PROBE_BYTES)
        if allowance.allows(peer(0), nbytes, number * pause)
    ]
    assert len(answered) <= (windows + 1) * MOST_PROBES
    assert sum(answered) <= (windows + 1) * MOST_BYTES


def test_an_honest_prober_is_never_refused() -> None:
    allowance, now = ProbeAllowance(), 0.0
    for _ in range(100):
        for _ in range(5):
            assert allowance.allows(peer(0), 0, now)
        assert allowance.allows(peer(0), FIRST_PROBE_BYTES, now + 0.2)
        assert allowance.allows(peer(0), MAX_PROBE_BYTES, now + 0.5)
        now += LEAST_PAUSE
