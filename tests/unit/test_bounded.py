"""The one kind of bounded table, and the pauses that grow: neither number nor time passes its bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.membership.ledger import MAX_QUARANTINE_SECONDS, OFFENCES, Ledger
from node.membership.view import MAX_SUSPECT_SECONDS, View
from protocol.access.peer_limits import Bounded, doubled
from protocol.ground import PeerId
from protocol.transport.dialling import LONGEST_PAUSE, Dials

PEER = PeerId("a peer")
FAILURES = 3_000  # 2^1024 is no float


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "setdefault", "update", "pop"]), st.integers(0, 9)), max_size=60
    )
)
def test_whichever_way_entries_are_set_the_newest_are_kept_in_order(steps: list[tuple[str, int]]) -> None:
    gone: list[int] = []
    table, model = Bounded[int, int](4, lambda key, entry: gone.append(key)), list[int]()
    dropped: list[int] = []
    for how, key in steps:
        if how == "pop":
            table.pop(key, None)
            model = [other for other in model if other != key]
            continue
        if how == "set":
            table[key] = key
        elif how == "setdefault":
            assert table.setdefault(key, key) == key
        else:
            table.update([(key, key)])
        if how != "setdefault" or key not in model:
            model = [*(other for other in model if other != key), key]
        dropped += model[:-4]
        model = model[-4:]
        assert list(table) == model
    assert gone == dropped


def test_dicts_own_way_past_the_bound_is_closed() -> None:
    table = Bounded[int, int](2)
    with pytest.raises(TypeError, match="one by one"):
        table |= {number: number for number in range(9)}
    assert not table


def suspicions() -> Callable[[], float]:
    view = View()
    time = 0.0
    view.elapsed = lambda: time  # type: ignore[method-assign]

    def fail() -> float:
        nonlocal time
        time += 0.1
        view.suspect(PEER)
        return view._suspects()[PEER] - time

    return fail


def quarantines() -> Callable[[], float]:
    ledger, time = Ledger(), 0.0

    def fail() -> float:
        nonlocal time
        time += 0.1
        for _ in range(OFFENCES):
            ledger.record_meeting(PEER, True, time)
        assert ledger.is_quarantined(PEER, time)
        return 0.0 if ledger.is_quarantined(PEER, time + MAX_QUARANTINE_SECONDS) else MAX_QUARANTINE_SECONDS

    return fail


def dials() -> Callable[[], float]:
    tried, time = Dials(), 0.0

    def fail() -> float:
        nonlocal time
        time += LONGEST_PAUSE
        tried.failed(PEER, time)
        assert tried.rests(PEER, time)
        return 0.0 if tried.rests(PEER, time + LONGEST_PAUSE) else LONGEST_PAUSE

    return fail


@pytest.mark.parametrize(
    ("made", "longest"),
    [(suspicions, MAX_SUSPECT_SECONDS), (quarantines, MAX_QUARANTINE_SECONDS), (dials, LONGEST_PAUSE)],
)
def test_a_peer_that_fails_for_ever_is_paused_for_the_longest_and_ends_nothing(
    made: Callable[[], Callable[[], float]], longest: float
) -> None:
    """Failed before: after 1,024 failures in a row the pause was an OverflowError, which ended the node."""
    fail = made()
    pauses = [fail() for _ in range(FAILURES)]
    assert pauses[-1] == pytest.approx(longest)
    assert max(pauses) <= longest * (1 + 1e-9)


@given(first=st.floats(1e-3, 1e3), times=st.integers(0, 10**9), longest=st.floats(1.0, 1e6))
def test_a_pause_doubles_up_to_the_longest(first: float, times: int, longest: float) -> None:
    pause = doubled(first, times, longest)
    assert pause <= longest
    assert math.isfinite(pause)
    if times < 60:
        assert pause == min(longest, first * 2.0**times)
