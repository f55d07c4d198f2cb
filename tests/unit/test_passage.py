"""One microbatch at a stage: what is told of it, and that it either counts or is given up, never both."""

from __future__ import annotations

import pytest

from node.pipeline.deliveries import Passage
from protocol.errors import Refused
from protocol.messages import Progress


def test_it_gets_on_with_each_state_and_with_what_the_device_finishes_meanwhile() -> None:
    finished = 5
    passage = Passage(lambda: finished)
    passage.queues(lambda: 3)
    first = passage.progress()
    assert (first.state, first.ahead) == ("queued", 3)
    finished = 7
    assert passage.progress().done == first.done + 2
    passage.computes()
    assert (passage.progress().state, passage.progress().done) == ("computing", first.done + 3)


def test_at_a_later_stage_only_what_that_one_says_counts() -> None:
    finished = 0
    passage = Passage(lambda: finished)
    passage.goes_onward()
    before = passage.progress().done
    finished = 9
    assert passage.progress().done == before
    for done in (4, 4, 6):
        passage.note_onward(Progress(state="queued", ahead=2, done=done))
    told = passage.progress()
    assert (told.state, told.ahead, told.done) == ("onward", 2, before + 2)


def test_once_it_counts_it_cannot_be_given_up() -> None:
    passage = Passage()
    assert passage.counting(lambda: "computed")() == "computed"
    assert not passage.give_up()


def test_what_was_given_up_is_not_computed() -> None:
    passage = Passage()
    assert passage.give_up()
    with pytest.raises(Refused, match="given-up"):
        passage.counting(lambda: "computed")()
