"""The search for a partner after the last step of a run, and of one that leaves: what it hears and wants done."""

from __future__ import annotations

import pytest
from searches import AT_ANY_TIME, A, B, K, Search, proposals_in

from node.rounds.meeting import Refusal
from node.rounds.partner_search import BUSY_SECONDS
from node.rounds.search_events import (
    Agreed,
    Event,
    Lane,
    LastSearchBegan,
    LastSearchEnded,
    LastSearchStopped,
    LookAround,
    PairsDropped,
    ProposalAnswered,
    ReadyAnswered,
    Reply,
    Retired,
    RoundBegan,
    RoundEnded,
    SendReady,
    SendRelease,
    SetTimer,
    StopTimer,
    TimerFired,
)

ENGAGED = Refusal("engaged")
LOOK = LookAround(Lane.FIRST)


def last_search() -> Search:
    search = Search()
    search.steps_on()
    assert search.hears(LastSearchBegan()) == [StopTimer(), LOOK]
    return search


def test_after_the_last_step_it_searches_until_a_partner_knows_of_the_end() -> None:
    search = last_search()
    proposal = search.asks(A)
    assert search.hears(ProposalAnswered(proposal, AT_ANY_TIME)) == [Agreed(proposal.pair), LOOK]
    assert search.sees(A) == [SendReady(proposal.pair)]
    assert search.hears(ReadyAnswered(proposal.pair, is_known=True)) == [LastSearchEnded()]


def test_after_the_last_step_it_asks_all_again_at_ever_longer_intervals() -> None:
    search, rests = last_search(), []
    for _ in range(12):
        search.hears(ProposalAnswered(search.asks(A), ENGAGED))
        [rest] = search.sees(A)
        assert isinstance(rest, SetTimer)
        rests.append(rest.seconds)
        assert search.hears(TimerFired()) == [LOOK]
    assert rests[0] <= 3 * BUSY_SECONDS
    assert 0.5 <= rests[-1] <= 1.5  # of a step of a second


def test_a_last_partner_that_knows_of_no_pair_is_replaced() -> None:
    search = last_search()
    proposal = search.asks(A)
    search.hears(ProposalAnswered(proposal, AT_ANY_TIME))
    search.sees(A)
    actions = search.hears(ReadyAnswered(proposal.pair, is_known=False))
    assert actions[-1] == LOOK
    assert search.asks(A, B).pair.partner == B


def test_one_that_others_wait_for_needs_no_search() -> None:
    search = Search()
    pair = search.agrees()
    assert search.hears(LastSearchBegan()) == [SendReady(pair)]
    assert search.hears(ReadyAnswered(pair, is_known=True)) == [LastSearchEnded()]


def test_a_last_search_that_is_stopped_reports_nothing_and_may_begin_again() -> None:
    search = last_search()
    proposal = search.asks(A)
    assert search.hears(LastSearchStopped()) == []
    assert search.hears(ProposalAnswered(proposal, AT_ANY_TIME)) == [Agreed(proposal.pair), LOOK]
    assert search.sees(A) == []
    assert search.hears(LastSearchBegan()) == [SendReady(proposal.pair)]


def test_a_partner_that_had_finished_is_not_asked_for_another_last_round() -> None:
    search = last_search()
    proposal = search.asks(A)
    search.hears(ProposalAnswered(proposal, AT_ANY_TIME))  # its steps take no time: it trains no more
    search.hears(RoundEnded())
    search.hears(RoundBegan(K))
    search.hears(LastSearchBegan())
    assert proposals_in(search.sees(A)) == []
    assert search.machine.closed_with == {A}


@pytest.mark.parametrize("event", [PairsDropped(), Retired()])
def test_one_that_leaves_releases_its_partner(event: Event) -> None:
    search = Search()
    pair = search.agrees()
    assert search.hears(event) == [SendRelease(pair)]
    assert not search.machine.has_agreed


def test_one_that_has_retired_looks_for_nobody_refuses_all_and_ends_its_last_search() -> None:
    search = last_search()
    proposal = search.asks(A)
    assert search.hears(Retired()) == []
    assert search.hears(ProposalAnswered(proposal, ENGAGED)) == [LastSearchEnded()]
    assert search.is_asked(B) == [Reply(Refusal("finished"))]
    assert search.steps_on() == []
