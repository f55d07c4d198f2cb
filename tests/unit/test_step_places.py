"""Places of a step: exactly the batch into each step, in order, and nobody is lost, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from node.pipeline.step_places import Decision, Sender, StepPlaces
from protocol.ground import PeerId


def places(batch: int, queue_limit: int, in_flight: int = 100) -> StepPlaces:
    """Return places of a step with none ahead of it; `in_flight` is more than any test needs unless given."""
    return StepPlaces(batch, queue_limit, ahead=0, in_flight=in_flight)


def test_the_batch_is_admitted_then_the_queue_fills_then_it_is_full() -> None:
    admission = places(batch=2, queue_limit=2)
    decisions = [admission.request(name) for name in "abcde"]
    assert decisions == [Decision.ADMITTED] * 2 + [Decision.QUEUED] * 2 + [Decision.FULL]
    assert (admission.running, admission.waiting) == (2, 2)


def test_a_step_is_complete_with_the_last_gradient_and_then_the_queue_moves_up() -> None:
    admission = places(batch=2, queue_limit=3)
    for name in "abcde":
        admission.request(name)
    admission.done("a")
    assert not admission.complete
    admission.done("b")
    assert admission.complete
    assert admission.next_step() == ["c", "d"]
    assert not admission.complete
    assert (admission.running, admission.waiting) == (2, 1)


def test_one_that_fails_frees_its_place_for_the_first_in_the_queue() -> None:
    admission = places(batch=1, queue_limit=2)
    for name in "abc":
        admission.request(name)
    assert admission.release("a") == ["b"]
    assert admission.release("c") == []  # gave up while it waited
    admission.done("b")
    assert admission.complete


def test_one_whose_gradient_is_in_keeps_its_place() -> None:
    admission = places(batch=2, queue_limit=2)
    for name in "abc":
        admission.request(name)
    admission.done("a")
    assert admission.release("a") == []
    assert (admission.running, admission.waiting) == (1, 1)


def test_only_so_many_are_in_flight_and_each_gradient_admits_the_next() -> None:
    admission = places(batch=4, queue_limit=4, in_flight=2)
    decisions = [admission.request(name) for name in "abcd"]
    assert decisions == [Decision.ADMITTED] * 2 + [Decision.QUEUED] * 2
    assert admission.done("b") == ["c"]
    assert admission.allow(3) == ["d"]
    assert [admission.done(name) for name in "acd"] == [[], [], []]
    assert admission.complete


def test_with_none_in_flight_those_at_work_end_and_nobody_follows() -> None:
    admission = places(batch=2, queue_limit=2, in_flight=1)
    admission.request("a")
    admission.request("b")
    assert admission.allow(0) == []
    assert admission.done("a") == []
    assert (admission.running, admission.waiting) == (0, 1)


def test_a_gradient_of_one_that_was_not_admitted_is_an_error() -> None:
    admission = places(batch=1, queue_limit=2)
    admission.request("a")
    admission.request("b")
    with pytest.raises(KeyError, match="b was not admitted"):
        admission.done("b")


def test_nobody_overtakes_the_queue() -> None:
    admission = places(batch=1, queue_limit=2)
    admission.request("a")
    admission.request("b")
    admission.done("a")
    admission.next_step()
    assert admission.request("c") is Decision.QUEUED
    assert admission.running == 1


class Crowd(RuleBasedStateMachine):
    """Requests, gradients, failures and steps in any order."""

    @initialize(
        batch=st.integers(1, 4), queue=st.integers(0, 5), ahead=st.integers(0, 5), flight=st.integers(1, 8)
    )
    def begin(self, batch: int, queue: int, ahead: int, flight: int) -> None:
        self.admission = StepPlaces(batch, queue, ahead, flight)
        self.most_ahead = min(ahead, batch)
        self.in_flight = self.most_in_flight = flight
        self.running: list[str] = []
        self.ahead: list[str] = []
        self.done: list[str] = []
        self.waiting: list[str] = []
        self.count = 0

    def moved_up(self, names: list[str]) -> None:
        for name in names:
            before = self.ahead if name in self.ahead else self.waiting
            assert before.pop(0) == name, "the order is kept"
            (self.running if self.admission.is_of_this_step(name) else self.ahead).append(name)

    @rule()
    def request(self) -> None:
        self.count += 1
        name = f"m{self.count}"
        decision = self.admission.request(name)
        places = {
            Decision.ADMITTED: self.running,
            Decision.AHEAD: self.ahead,
            Decision.QUEUED: self.waiting,
        }
        if decision is Decision.FULL:
            assert len(self.waiting) == self.admission.queue_limit
        else:
            places[decision].append(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def gradient(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running))
        self.running.remove(name)
        self.done.append(name)
        self.moved_up(self.admission.done(name))

    @precondition(lambda self: self.running or self.ahead or self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """It failed, or its sender's patience ended while it waited."""
        name = data.draw(st.sampled_from(self.running + self.ahead + self.waiting))
        for place in (self.running, self.ahead, self.waiting):
            if name in place:
                place.remove(name)
        self.moved_up(self.admission.release(name))

    @rule(flight=st.integers(1, 8))
    def another_window(self, flight: int) -> None:
        self.in_flight = flight
        self.moved_up(self.admission.allow(flight))

    @precondition(lambda self: self.admission.complete)
    @rule()
    def step(self) -> None:
        assert len(self.done) == self.admission.batch
        self.done.clear()
        self.moved_up(self.admission.next_step())

    @invariant()
    def the_counts_agree_and_the_batch_is_never_exceeded(self) -> None:
        admission = self.admission
        running = len(self.running) + len(self.ahead)
        assert (admission.running, admission.waiting) == (running, len(self.waiting))
        assert len(self.running) + len(self.done) <= admission.batch
        assert admission.complete == (len(self.done) == admission.batch)
        assert len(self.ahead) <= self.most_ahead
        self.most_in_flight = max(self.in_flight, min(self.most_in_flight, running))  # it may shrink slowly
        assert running <= self.most_in_flight
        is_whole = len(self.running) + len(self.done) == admission.batch
        if self.waiting:  # no place is left empty while somebody waits
            assert running >= self.in_flight or (is_whole and len(self.ahead) == self.most_ahead)
        if self.ahead:
            assert is_whole


TestCrowd = Crowd.TestCase


@given(batch=st.integers(1, 8), requests=st.integers(0, 40))
def test_everything_that_was_taken_on_is_done_in_the_end_and_in_order(batch: int, requests: int) -> None:
    admission = places(batch, queue_limit=100)
    names = [f"m{number}" for number in range(requests)]
    running = [name for name in names if admission.request(name) is Decision.ADMITTED]
    order: list[str] = []
    while running:
        for name in running:
            admission.done(name)
            order.append(name)
        running = admission.next_step() if admission.complete else []
    assert order == names


ALICE, BOB, MALLORY = (Sender(PeerId(name), name) for name in ("alice", "bob", "mallory"))


def test_those_that_wait_take_turns_by_sender() -> None:
    """Failed before: first come, first served."""
    admission = places(batch=1, queue_limit=6)
    for name in ("m0", "m1", "m2", "m3", "m4"):
        admission.request(name, MALLORY)
    admission.request("a", ALICE)
    admission.request("b", BOB)
    order = []
    for _ in range(4):
        [name] = (admission.done(next(iter(admission._admitted))), admission.next_step())[1]
        order.append(name)
    assert order == ["a", "b", "m1", "m2"]


def test_those_of_one_network_share_its_turns() -> None:
    admission = places(batch=1, queue_limit=20)
    for number in range(8):
        admission.request(f"m{number}", Sender(PeerId(f"mallory {number}"), "a network"))
    for number in range(3):
        admission.request(f"a{number}", ALICE)
    order = []
    for _ in range(6):
        admission.done(next(iter(admission._admitted)))
        order += admission.next_step()
    assert order == ["a0", "m1", "a1", "m2", "a2", "m3"]


def test_a_full_queue_takes_others_until_the_shares_are_even() -> None:
    admission = places(batch=1, queue_limit=4)
    for name in ("m0", "m1", "m2", "m3", "m4"):
        assert admission.request(name, MALLORY) is not Decision.FULL
    assert admission.request("m5", MALLORY) is Decision.FULL
    assert admission.displace(MALLORY) is None
    assert [admission.displace(ALICE), admission.request("a0", ALICE)] == ["m4", Decision.QUEUED]
    assert [admission.displace(ALICE), admission.request("a1", ALICE)] == ["m3", Decision.QUEUED]
    assert admission.displace(ALICE) is None
    assert [admission.displace(BOB), admission.request("b0", BOB)] == ["a1", Decision.QUEUED]
    assert admission.waiting == 4
