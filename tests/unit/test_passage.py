"""A microbatch's passage to the next stage as tables: what it hears, and what it wants done. No loop, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from passage_diagram import arrows, diagram
from passages import BROKEN, BUSY, GONE, LIMIT, ODD, PEERS, SILENT, A, B, C, D, Way, life, sent_in, way_of

from node.pipeline.next_stage import LEAST_DEADLINE
from node.pipeline.passage import (
    MOST_ASKED,
    MOST_RETRY_SECONDS,
    PAUSE_SECONDS,
    RETRY_SECONDS,
    Answer,
    AskBacklog,
    Blame,
    Due,
    Ended,
    Event,
    GiveUp,
    LetFinish,
    Phase,
    Report,
    ReportNobody,
    Send,
    SetTimer,
    Take,
    Told,
)
from protocol.errors import PeerUnreachable, TransportDown
from protocol.ground import PeerId

AT_ONCE = SetTimer(0.0)

# --- whom to ask ------------------------------------------------------------------------------------


def test_of_two_that_are_drawn_the_one_with_less_to_do_gets_it() -> None:
    way = Way(A, B)
    first, second = way.is_due()
    assert isinstance(first, AskBacklog)
    assert isinstance(second, AskBacklog)
    assert {first.peer, second.peer} == {A, B}
    assert way.hears(Told(first.peer, 2.0)) == []
    assert sent_in(way.hears(Told(second.peer, 0.5))) == second.peer


def test_the_only_one_gets_it_unasked() -> None:
    assert Way(A).is_due() == [Send(A, LIMIT), SetTimer(LIMIT)]


def test_nobody_is_asked_how_much_it_has_to_do_where_that_takes_long_beside_the_work() -> None:
    way = Way(A, B)
    way.knows_answers(0.1)
    for _ in range(2):  # the first answer of a peer opens a stream and says nothing
        for peer in (A, B):
            way.following.choices.times.answered(peer, 1.0)
    assert isinstance(way.is_due()[0], Send)


def test_one_that_takes_no_more_comes_after_one_that_does_and_one_that_is_silent_too() -> None:
    for unwilling in (Told(A, BUSY), Told(A, SILENT), Told(A, GONE)):
        way = Way(A, B)
        way.is_due()
        assert way.hears(unwilling) == []
        assert sent_in(way.hears(Told(B, 9.0))) == B


def test_only_silence_counts_as_a_missed_deadline_of_the_question() -> None:
    for was_silent in (True, False):
        way = Way(A, B)
        way.knows_answers(9.0)
        for _ in range(12):
            way.following.choices.times.answered(A, 0.1)
        way.is_due()
        usual = way.following.choices.times.deadline_of(A)
        way.hears(Told(A, SILENT if was_silent else GONE))
        assert (way.following.choices.times.deadline_of(A) > usual) is was_silent


def test_the_time_that_a_question_takes_is_learned_also_from_one_that_takes_no_more() -> None:
    way = Way(A, B)
    for _ in range(2):  # the first answer of a peer opens a stream and says nothing
        way.knows_answers(9.0)
        one = way.another()
        one.is_due()
        one.now += 0.25
        one.hears(Told(A, BUSY))
        one.hears(Told(B, GONE))
    assert way.following.choices.times.round_trip == 0.25


def test_an_answer_about_the_backlog_that_comes_too_late_changes_nothing() -> None:
    way = Way(A, B)
    way.is_due()
    way.hears(Told(A, SILENT))
    assert way.hears(Told(A, 0.0)) == []
    assert sent_in(way.hears(Told(B, 9.0))) == B
    assert way.hears(Told(B, 0.0)) == []


def test_in_a_ring_the_one_that_drew_it_is_asked_first_and_then_others() -> None:
    way = Way(A, B, home=B)
    assert sent_in(way.is_due()) == B
    assert way.hears(Ended(B, BUSY)) == [AT_ONCE]
    assert sent_in(way.is_due()) == A


def test_with_others_to_ask_silence_ends_sooner_than_the_manifest_allows() -> None:
    one, many = Way(A), Way(A, B)
    for way in (one, many):
        way.knows_answers()
    assert one.is_due()[0] == Send(A, LIMIT)
    [send, _] = many.is_sent()
    assert isinstance(send, Send)
    assert LEAST_DEADLINE <= send.silence < LIMIT


# --- where nobody takes it --------------------------------------------------------------------------


def test_a_busy_one_costs_no_time_while_another_one_is_there() -> None:
    way = Way(A, B)
    busy = way.sends()
    assert way.hears(Ended(busy, BUSY)) == [AT_ONCE]
    assert {busy, way.sends()} == {A, B}


def test_busy_ones_are_asked_again_after_a_pause_that_doubles() -> None:
    way, pauses = Way(A), []
    for _ in range(6):
        assert way.sends() == A
        assert way.hears(Ended(A, BUSY)) == [AT_ONCE]
        [timer] = way.is_due()
        assert isinstance(timer, SetTimer)
        pauses.append(timer.seconds)
    assert pauses == [RETRY_SECONDS * 2**number for number in range(5)] + [MOST_RETRY_SECONDS]


def test_without_a_live_one_that_is_reported_and_it_looks_again() -> None:
    way = Way()
    assert way.is_due() == [ReportNobody(), SetTimer(PAUSE_SECONDS)]
    assert way.sends(A) == A


def test_a_node_that_leaves_waits_for_nobody_who_may_never_come() -> None:
    way = Way()
    way.following.is_leaving = True
    [end] = way.is_due()
    assert isinstance(end, GiveUp)
    assert isinstance(end.error, TransportDown)
    assert Way(A).sends() == A  # what others can still take is sent


def test_without_its_own_network_it_waits_and_asks_the_same_again() -> None:
    way, down = Way(A), TransportDown("p2pd restarts")
    assert way.sends() == A
    assert way.hears(Ended(A, down)) == [SetTimer(PAUSE_SECONDS)]
    assert way.sends() == A
    way.following.is_leaving = True
    assert way.hears(Ended(A, down)) == [GiveUp(down)]


# --- refusals for what it holds ---------------------------------------------------------------------


def test_what_two_refuse_for_its_content_is_given_up() -> None:
    way = Way(A, B, C)
    assert way.hears(Ended(way.sends(), ODD)) == [AT_ONCE]
    assert way.hears(Ended(way.sends(), ODD)) == [GiveUp(ODD)]
    assert way.machine.is_over


def test_one_that_refused_the_content_is_not_asked_again_after_a_pause() -> None:
    way = Way(A, B)
    way.hears(Ended(way.sends(A), ODD))
    assert way.sends() == B
    way.hears(Ended(B, BUSY))
    assert way.is_due() == [SetTimer(RETRY_SECONDS)]
    assert way.sends() == B


def test_what_the_only_one_refuses_for_its_content_is_given_up_and_not_asked_again() -> None:
    way = Way(A)
    assert way.hears(Ended(way.sends(), ODD)) == [AT_ONCE]
    assert way.is_due() == [GiveUp(ODD)]


def test_one_that_refuses_what_another_one_takes_is_reported() -> None:
    way = Way(A, B)
    asked, first = way.now, way.sends()
    way.hears(Ended(first, ODD))
    second = way.sends()
    assert way.is_answered(second) == [Take(second), Report(first, ODD, asked)]


# --- peers that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [GONE, SILENT, BROKEN])
def test_a_failure_is_reported_and_costs_one_resend_to_another_one(failure: PeerUnreachable) -> None:
    way = Way(A, B)
    asked, first = way.now, way.sends()
    way.now += 6.0
    assert way.hears(Ended(first, failure)) == [Report(first, failure, asked), AT_ONCE]
    assert way.sends() != first


def test_one_that_fails_is_measured_anew_and_only_silence_makes_deadlines_longer() -> None:
    for failure, grows in ((SILENT, True), (GONE, False)):
        way = Way(A)
        way.knows_answers(2.0)
        usual = way.following.silence(has_others=True)
        for _ in range(8):
            one = way.another()
            one.hears(Ended(one.sends(), failure))
        assert (way.following.silence(has_others=True) > usual) is grows
        assert not way.following.router.has_answered(A)


def test_how_long_nobody_takes_it_is_counted_from_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    way, waits = Way(A), []

    def candidates(peers: object, exclude: object, waited: float) -> list[PeerId]:
        waits.append(waited)
        return [A]

    monkeypatch.setattr(way.following, "candidates", candidates)
    for how in (BUSY, GONE, BUSY):
        way.sends()
        way.now += 2.0
        way.hears(Ended(A, how))
    way.sends()
    assert waits == [0.0, 2.0, 0.0, 2.0]


def test_only_what_was_answered_counts_as_the_peers_share() -> None:
    failures: list[Event] = [
        Ended(A, BUSY),
        Ended(A, GONE),
        Ended(A, TransportDown("")),
        Ended(A, None),
    ]
    for end in [*failures, Ended(A, Answer(1.0, 1.0))]:
        way = Way(A)
        for _ in range(20):
            one = way.another()
            one.sends()
            one.hears(end)
        assert way.following.router.is_full(A, [A, B, C]) is isinstance(end.how, Answer)
        assert list(way.following.choices.holders) == []


# --- answers that take long -------------------------------------------------------------------------


def test_when_an_answer_takes_far_longer_than_usual_another_one_is_asked_beside() -> None:
    way = Way(A, B)
    way.knows_answers()
    first, second = way.sends(), way.sends()
    assert {first, second} == {A, B}
    asked = way.now
    assert way.is_answered(second)[0] == Take(second)
    [late] = [LetFinish(first, asked, 1.0, way.following.times.second_after())]
    assert late.usual == way.following.times.second_after()


def test_the_first_answer_counts_and_the_others_may_finish() -> None:
    way = Way(A, B, C)
    way.knows_answers()
    asked, first = way.now, way.sends()
    second, third = way.sends(), way.sends()
    take, *late = way.is_answered(third)
    usual = way.following.times.second_after()
    assert take == Take(third)
    assert late == [LetFinish(first, asked, 1.0, usual), LetFinish(second, asked, 1.0, usual)]


def test_no_more_than_a_few_have_it_at_once() -> None:
    way = Way(*PEERS)
    way.knows_answers()
    timers = [any(isinstance(action, SetTimer) for action in way.is_sent()) for _ in range(MOST_ASKED)]
    assert timers == [True] * (MOST_ASKED - 1) + [False]


def test_before_the_first_answer_of_all_only_one_that_has_nothing_of_this_node_is_asked_beside() -> None:
    first = Way(A, B)
    one = first.sends()
    [other] = {A, B} - {one}
    second = first.another()
    assert second.sends(other) == other
    assert first.is_due() == [SetTimer(RETRY_SECONDS)]  # both may still compile
    assert first.is_due(A, B, C)[0] == Send(C, LIMIT)


def test_while_it_waits_beside_others_for_one_more_nobody_is_reported_missing() -> None:
    way = Way(A)
    way.knows_answers()
    way.sends()
    assert way.is_due() == [SetTimer(RETRY_SECONDS)]
    assert way.hears(Due(())) == [SetTimer(2 * RETRY_SECONDS)]


def test_a_refusal_that_comes_while_another_one_is_chosen_has_nobody_else_asked() -> None:
    way = Way(A, B, C)
    way.knows_answers()
    first = way.sends()
    one, other = way.is_due()
    assert isinstance(one, AskBacklog)
    assert isinstance(other, AskBacklog)
    assert way.hears(Ended(first, BUSY)) == []
    way.hears(Told(one.peer, 1.0))
    assert sent_in(way.hears(Told(other.peer, 2.0))) == one.peer


def late_way() -> tuple[Way, PeerId]:
    """One that is over, and the peer that has it still."""
    way = Way(A, B)
    way.knows_answers()
    late, taken = way.sends(), way.sends()
    assert LetFinish(late, way.now, 1.0, way.following.times.second_after()) in way.is_answered(taken)
    return way, late


@pytest.mark.parametrize(
    ("failure", "is_blamed"),
    [(SILENT, True), (BROKEN, True), (GONE, False)],
    ids=["silent", "broken", "gone"],
)
def test_a_late_one_is_blamed_for_silence_and_nonsense_and_not_for_being_gone(
    failure: PeerUnreachable, is_blamed: bool
) -> None:
    way, late = late_way()
    assert way.hears(Ended(late, failure)) == ([Blame(late)] if is_blamed else [])


def test_a_late_refusal_changes_nothing_and_a_late_answer_says_how_slow_its_peer_is() -> None:
    way, late = late_way()
    assert way.hears(Ended(late, ODD)) == []
    way, late = late_way()
    usual = way.following.router.usual_answer(late)
    for _ in range(9):  # so that the quarter of its answers that counts is late ones
        other = way.another()
        while other.sends() != late:
            pass
        other.now += 60.0
        other.hears(Ended(late, Answer(60.0, 1.0)))
    assert way.is_answered(late, 60.0) == []
    assert way.following.router.usual_answer(late) > usual
    assert late not in way.following.choices.holders


# --- at random --------------------------------------------------------------------------------------


def test_whatever_peers_do_it_comes_to_one_end_and_never_waits_for_nothing() -> None:
    ends = set()
    for seed in range(300):
        wanted = [actions for *_, actions in life(seed)]
        [end] = [action for actions in wanted for action in actions if isinstance(action, Take | GiveUp)]
        ends.add(type(end))
    assert ends == {Take, GiveUp}


def test_a_log_of_events_replays_to_the_same_actions() -> None:
    for seed in range(20):
        log, again = list(life(seed)), way_of(seed)
        told = [again.machine.handle(event, now) for _, event, now, _ in log]
        assert told == [actions for *_, actions in log]


def test_it_shows_whom_it_asks() -> None:
    way = Way(D)
    way.sends()
    assert repr(way.machine) == "<Passage, asking, asks d, 0 tried>"


# --- its picture ------------------------------------------------------------------------------------


def test_the_page_shows_the_phases_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "walks.md").read_text(encoding="utf-8")
    assert diagram() in page, "python tests/unit/passage_diagram.py prints the diagram for docs/walks.md"


def test_every_phase_is_entered_and_all_but_the_last_are_left() -> None:
    found = arrows()
    assert {after for _, after in found} == set(Phase)
    assert {before for before, _ in found} == set(Phase) - {Phase.OVER}
