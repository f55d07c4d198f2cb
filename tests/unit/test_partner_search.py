"""The search for a partner as tables: what it hears, and what it wants done. No loop, no network, no clock."""

from __future__ import annotations

import random
from typing import Any

import pytest
from searches import AT_ANY_TIME, CROWD, IN_STEP, A, B, C, K, Search, proposal_in, proposals_in

from node.membership.ledger import fair_shares
from node.rounds.meeting import Meeting, Pair, Refusal
from node.rounds.pairing import Pairing
from node.rounds.partner_search import BUSY_SECONDS, Phase
from node.rounds.search_events import (
    Action,
    Agreed,
    AskedToSitOut,
    Asker,
    AskForRecord,
    Event,
    Lane,
    LookAround,
    Looked,
    PartnerReady,
    PartnerReleased,
    ProposalAnswered,
    ProposalLost,
    Proposed,
    ReadyAnswered,
    RecordArrived,
    Reply,
    RoundBegan,
    RoundEnded,
    SendProposal,
    SendReady,
    SendRelease,
    SendSitOut,
    SetTimer,
    StepDone,
    StepJudged,
    Suspect,
    TimerFired,
)
from protocol.ground import PeerId

ENGAGED, BUSY = Refusal("engaged"), Refusal("busy")
LOOK, LOOK_BESIDE = LookAround(Lane.FIRST), LookAround(Lane.BESIDE)


def reply(actions: list[Action]) -> Meeting | Refusal | None:
    [answer] = [action.answer for action in actions if isinstance(action, Reply)]
    return answer


def is_short_rest(actions: list[Action]) -> bool:
    match actions:
        case [SetTimer(seconds)]:
            return 0.5 * BUSY_SECONDS <= seconds <= 1.5 * BUSY_SECONDS
    return False


# --- looking for a partner --------------------------------------------------------------------------


def test_before_its_first_step_it_looks_for_nobody() -> None:
    search = Search()
    assert search.hears(RoundBegan(K)) == []
    assert search.is_asked() == [Reply(Refusal("early"))]


def test_one_that_had_no_partner_begins_to_look_at_its_first_step() -> None:
    search = Search()
    assert search.steps_on() == [SetTimer(0.0)]
    assert search.steps_on() == []  # once
    assert search.hears(TimerFired()) == [LOOK]


def test_one_that_had_a_partner_begins_at_a_random_moment_of_the_first_half() -> None:
    search = Search()
    search.agrees()
    search.steps_on(K - 1)
    [timer] = search.next_round()
    assert isinstance(timer, SetTimer)
    assert 0 < timer.seconds <= K / 2


def test_of_few_it_asks_one_after_another() -> None:
    search = Search()
    search.seeks()
    first = search.sees(A, B)
    assert first == [SendProposal(proposal_in(first))]
    assert search.hears(ProposalAnswered(proposal_in(first), ENGAGED)) == [LOOK]
    second = search.sees(A, B)
    assert {one.pair.partner for one in proposals_in(first + second)} == {A, B}


def test_of_many_it_asks_two_at_a_time() -> None:
    search = Search()
    search.seeks()
    actions = search.sees(*CROWD)
    first = proposal_in(actions)
    assert actions == [SendProposal(first), LOOK_BESIDE]
    second = search.asks(*CROWD, lane=Lane.BESIDE)
    assert first.pair.partner != second.pair.partner
    assert search.hears(ProposalAnswered(first, ENGAGED)) == [LOOK]
    assert search.hears(ProposalAnswered(second, ENGAGED)) == [LOOK_BESIDE]


def test_of_two_that_agree_the_second_is_released() -> None:
    search = Search()
    search.seeks()
    first, second = search.asks(*CROWD), search.asks(*CROWD, lane=Lane.BESIDE)
    assert search.hears(ProposalAnswered(second, AT_ANY_TIME)) == [Agreed(second.pair), LOOK_BESIDE]
    assert search.sees(*CROWD, lane=Lane.BESIDE) == []
    assert search.hears(ProposalAnswered(first, AT_ANY_TIME)) == [SendRelease(first.pair), LOOK]
    assert search.sees(*CROWD) == []
    assert search.machine.pair == second.pair


def test_a_busy_one_is_asked_again_after_a_few_milliseconds() -> None:
    search = Search()
    search.seeks()
    proposal = search.asks(A)
    assert is_short_rest(search.hears(ProposalAnswered(proposal, BUSY)))
    assert search.hears(TimerFired()) == [LOOK]
    assert search.asks(A).pair.partner == A


def test_a_busy_one_asked_beside_leaves_the_first_lane_to_go_on() -> None:
    search = Search()
    search.seeks()
    first, second = search.asks(*CROWD), search.asks(*CROWD, lane=Lane.BESIDE)
    assert search.hears(ProposalAnswered(second, BUSY)) == []
    assert search.hears(ProposalAnswered(first, ENGAGED)) == [LOOK]
    assert LOOK_BESIDE in search.sees(*CROWD)


def test_with_nobody_else_to_ask_it_waits_for_the_one_asked_beside() -> None:
    search = Search()
    search.seeks()
    first, second = search.asks(*CROWD), search.asks(*CROWD, lane=Lane.BESIDE)
    search.hears(ProposalAnswered(first, ENGAGED))
    assert search.sees(second.pair.partner) == []
    assert search.machine.phase is Phase.WAITING
    assert search.hears(ProposalAnswered(second, ENGAGED)) == [LOOK_BESIDE]
    assert search.sees(lane=Lane.BESIDE) == [LOOK]


def test_one_that_does_not_answer_is_left_alone_and_released_since_it_may_have_agreed() -> None:
    search = Search()
    search.seeks()
    lost = search.asks(A)
    assert search.hears(ProposalLost(lost)) == [Suspect(A), SendRelease(lost.pair), LOOK]
    assert search.sees() == []
    assert search.machine.phase is Phase.IDLE


def test_a_yes_makes_a_pair_that_is_reported_once() -> None:
    search = Search()
    search.seeks()
    proposal = search.asks(A)
    search.now += 0.25
    assert search.hears(ProposalAnswered(proposal, AT_ANY_TIME)) == [Agreed(proposal.pair), LOOK]
    assert search.machine.search_seconds == 0.25
    assert search.sees(A, B) == []
    assert search.steps_on() == []


def test_a_yes_that_comes_too_late_is_released() -> None:
    search = Search()
    search.seeks()
    proposal = search.asks(A)
    search.hears(RoundEnded())
    assert search.hears(ProposalAnswered(proposal, AT_ANY_TIME)) == [SendRelease(proposal.pair), LOOK]
    assert search.machine.pair is None


def test_an_answer_to_what_it_did_not_ask_changes_nothing() -> None:
    search, other = Search(), Search(seed=1)
    search.seeks()
    other.seeks()
    proposal, foreign = search.asks(A), other.asks(A)
    assert search.hears(ProposalAnswered(foreign, AT_ANY_TIME)) == []
    assert search.hears(ProposalAnswered(proposal, ENGAGED)) == [LOOK]
    assert search.hears(ProposalAnswered(proposal, AT_ANY_TIME)) == []
    assert search.machine.pair is None


def test_late_in_a_search_it_asks_for_the_record_of_one_that_the_engaged_name() -> None:
    search = Search()
    search.seeks()
    for number, expected in enumerate(["look", "look", "record"]):
        proposal = search.asks(CROWD[number])
        actions = search.hears(ProposalAnswered(proposal, Refusal("engaged", PeerId(f"partner {number}"), C)))
        assert actions == ([LOOK] if expected == "look" else [AskForRecord(proposal, C)])
    assert search.hears(TimerFired()) == []  # it waits for the record
    assert search.hears(RecordArrived(proposal)) == [LOOK]
    assert search.hears(RecordArrived(proposal)) == []
    assert search.asks(C, *CROWD[4:6]).pair.partner == C


def test_when_all_have_refused_the_search_ends_and_a_pair_that_breaks_begins_another() -> None:
    search = Search()
    search.seeks()
    for _ in range(2):  # for this round, then for the next one
        search.hears(ProposalAnswered(search.asks(A), ENGAGED))
    assert search.sees(A) == []
    assert search.machine.phase is Phase.IDLE
    search.is_asked(B)
    assert search.machine.pair == Pair(B, "theirs")
    assert search.hears(PartnerReleased(Pair(B, "theirs"))) == [SetTimer(0.0)]
    assert search.hears(PartnerReleased(Pair(B, "theirs"))) == []


def test_one_that_is_alone_asks_an_engaged_one_to_be_left_over_in_its_turn() -> None:
    search = Search()
    search.seeks()
    search.hears(ProposalAnswered(search.asks(A), Refusal("engaged", B)))
    proposal = search.asks(A, B, C)
    search.hears(ProposalAnswered(proposal, Refusal("engaged", A)))
    actions = search.sees(A, B, C)  # all are engaged: it asks for its next round
    later = proposal_in(actions)
    theirs = Meeting(K / 2, K + 4.0, 4.0 * K, 1.0)
    assert search.hears(ProposalAnswered(later, theirs)) == [LOOK]
    [sit_out] = search.sees(A, B, C)
    assert isinstance(sit_out, SendSitOut)
    assert sit_out.peer in {A, B, C} - {later.pair.partner}


def test_an_exception_leaves_the_search_idle_and_the_next_step_begins_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Search()
    search.seeks()

    def fail(*_: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(Pairing, "propose", fail)
        with pytest.raises(RuntimeError):
            search.sees(A)
    assert search.steps_on() == [SetTimer(0.0)]


# --- the end of a round -----------------------------------------------------------------------------


def test_the_partner_is_told_once_that_the_round_ends() -> None:
    search = Search()
    pair = search.agrees()
    told = [action for _ in range(K) for action in search.steps_on() if isinstance(action, SendReady)]
    assert told == [SendReady(pair)]
    assert search.machine.must_end(search.now)
    assert search.hears(RoundEnded()) == []


def test_a_round_that_ends_early_tells_the_partner_then() -> None:
    search = Search()
    pair = search.agrees()
    assert search.hears(RoundEnded()) == [SendReady(pair)]


def test_a_partner_that_reports_its_end_ends_the_round_here_too() -> None:
    search = Search()
    pair = search.agrees()
    search.steps_on(K - 4)
    assert not search.machine.must_end(search.now)
    assert search.hears(PartnerReady(pair)) == [Reply()]
    assert search.machine.must_end(search.now)
    assert search.hears(PartnerReady(Pair(B, pair.name))) == [Reply(Refusal("unknown-pair"))]


def test_a_partner_that_knows_of_no_pair_is_replaced() -> None:
    search = Search()
    pair = search.agrees()
    assert search.hears(ReadyAnswered(pair, is_known=True)) == []
    assert search.hears(ReadyAnswered(pair, is_known=False)) == [SetTimer(0.0)]
    assert search.machine.pair is None


def test_in_the_middle_of_a_round_it_asks_whether_the_pair_still_holds() -> None:
    search = Search()
    pair = search.agrees()
    renewal = proposal_in(search.steps_on(K // 2 - 1))
    assert renewal.pair == pair
    assert search.steps_on() == []  # it awaits the answer
    assert search.hears(ProposalAnswered(renewal, Refusal("out-of-step"))) == [SetTimer(0.0)]
    assert search.machine.pair is None


def test_where_the_partner_asked_a_renewal_is_not_taken_for_the_end_of_the_search() -> None:
    search = Search()
    search.seeks()
    proposal = search.asks(A)
    search.hears(ProposalAnswered(proposal, BUSY))
    search.is_asked(B, IN_STEP)
    renewal = proposal_in(search.steps_on(K // 2 - 1))
    assert search.hears(ProposalAnswered(renewal, IN_STEP)) == []
    assert search.machine.search_seconds is None


def test_of_a_partner_in_doubt_it_asks_at_once_and_if_it_is_lost_looks_for_another() -> None:
    search = Search()
    pair = search.agrees()
    search.steps_on()
    renewal = proposal_in(search.steps_on(in_doubt=True))
    assert search.hears(ProposalLost(renewal)) == [Suspect(A), SendRelease(pair), SetTimer(0.0)]


def test_one_that_is_behind_its_stage_begins_nothing() -> None:
    assert Search().steps_on(is_behind=True) == []


def test_one_that_does_not_step_looks_for_nobody_and_refuses() -> None:
    search = Search()
    search.steps_on()
    search.now += 100.0
    assert search.hears(TimerFired()) == []
    assert search.is_asked() == [Reply(Refusal("early"))]
    assert search.hears(AskedToSitOut(AT_ANY_TIME)) == [Reply(Refusal("other-stage"))]


# --- what others ask --------------------------------------------------------------------------------


def test_a_proposal_is_accepted_and_the_pair_reported_before_the_answer() -> None:
    search = Search()
    search.steps_on()
    agreed, answer = search.is_asked(A)
    assert agreed == Agreed(Pair(A, "theirs"))
    assert isinstance(answer, Reply)
    assert isinstance(answer.answer, Meeting)
    again = search.hears(Proposed(Pair(A, "theirs"), AT_ANY_TIME))
    assert [type(action) for action in again] == [Reply]  # it asks whether the pair still holds


@pytest.mark.parametrize(
    ("asker", "code"),
    [
        (Asker(serves_other_stage=True), "other-stage"),
        (Asker(is_quarantined=True), "unwanted"),
        (Asker(has_other_version=True), "other-version"),
        (Asker(has_other_lineage=True), "other-lineage"),
        (Asker(must_wait=True), "early"),
    ],
)
def test_one_with_which_it_may_not_average_is_refused(asker: Asker, code: str) -> None:
    search = Search()
    search.steps_on()
    answer = reply(search.hears(Proposed(Pair(A, "theirs"), AT_ANY_TIME, asker)))
    assert isinstance(answer, Refusal)
    assert answer.code == code
    assert not search.machine.has_agreed


def test_one_of_a_network_that_averaged_here_often_is_refused_but_not_the_pair_it_has() -> None:
    search, many = Search(), [PeerId(f"many {number}") for number in range(8)]
    shares = fair_shares([*many, *CROWD], lambda peer: "one network" if peer in many else peer)
    pairs: list[Pair] = []
    for number, peer in enumerate(many):
        search.steps_on()
        asker, pair = Asker(shares=shares), Pair(peer, f"pair {number}")
        answer = reply(search.hears(Proposed(pair, AT_ANY_TIME, asker)))
        if isinstance(answer, Refusal):
            break
        pairs.append(pair)
        assert not isinstance(reply(search.hears(Proposed(pair, AT_ANY_TIME, asker))), Refusal)
        search.hears(RoundEnded())
        search.hears(RoundBegan(K))
    assert isinstance(answer, Refusal)
    assert answer.code == "unwanted"
    assert 1 < len(pairs) < len(many)
    without = reply(search.hears(Proposed(pair, AT_ANY_TIME)))
    assert not isinstance(without, Refusal)


def test_one_is_left_over_in_its_turn_unless_it_has_a_partner() -> None:
    search = Search()
    search.agrees()
    search.steps_on(K - 1)
    search.next_round()
    at_its_end = Meeting(K - 2.0, float(K), K + 2.0, 1.0)
    assert search.hears(AskedToSitOut(at_its_end, serves_other_stage=True)) == [Reply(Refusal("other-stage"))]
    assert search.hears(AskedToSitOut(at_its_end)) == [Reply()]
    assert search.is_asked(B, at_its_end) == [Reply(Refusal("engaged"))]
    engaged = Search()
    engaged.agrees()
    assert engaged.hears(AskedToSitOut(at_its_end)) == [Reply(Refusal("engaged"))]


# --- a log of events --------------------------------------------------------------------------------


def test_a_log_of_events_replays_to_the_same_actions() -> None:
    dice, first, again = random.Random(3), Search(seed=5), Search(seed=5)
    log: list[tuple[Event, float, list[Action]]] = []

    def hears(event: Event) -> list[Action]:
        actions = first.machine.handle(event, first.now)
        log.append((event, first.now, actions))
        for action in actions:
            if isinstance(action, LookAround):
                hears(Looked(action.lane, CROWD, fair_shares(CROWD, lambda peer: peer)))
        return actions

    for step in range(60):
        first.now += dice.uniform(0.5, 1.5)
        for event in (StepDone(1.0), StepJudged(), TimerFired()):
            hears(event)
        for proposal in [one for _, _, actions in log[-4:] for one in proposals_in(actions)]:
            hears(ProposalAnswered(proposal, dice.choice([AT_ANY_TIME, ENGAGED, BUSY])))
        if step % 10 == 9:
            hears(RoundEnded())
            hears(RoundBegan(K))
    assert sum(len(proposals_in(actions)) for _, _, actions in log) > 5
    assert [again.machine.handle(event, now) for event, now, _ in log] == [actions for _, _, actions in log]
