"""Admission to inner steps as tables: what happens to microbatches, and what they may do then. No loop, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from admission_diagram import AT_REST, Place, arrows, diagram

from node.model.memory_model import QUEUE_BATCHES
from node.pipeline.admission import (
    END_OF_ROUND,
    OTHERS_WAIT,
    Action,
    Admission,
    Allowed,
    Asked,
    Backward,
    Counted,
    Draining,
    Event,
    Forward,
    GivenUp,
    GradientCame,
    Held,
    Refuse,
    StepBegan,
    TakeStep,
)
from node.pipeline.step_places import Sender
from protocol.ground import PeerId

ALICE, MALLORY = (Sender(PeerId(name), name) for name in ("alice", "mallory"))
FULL = f"{QUEUE_BATCHES} microbatches wait here already"
Row = tuple[Event, list[Action]]

# With a batch of one the queue has as many places as it has batches. Each row: an event, and what follows.
QUEUE = [f"q{number}" for number in range(QUEUE_BATCHES)]
FILLED: list[Row] = [(Asked("a"), [Forward("a")]), *((Asked(name), []) for name in QUEUE)]

TABLES: dict[str, tuple[int, list[Row]]] = {
    "one is taken into the step, runs, counts, and the step is taken": (
        0,
        [
            (Asked("a"), [Forward("a")]),
            (GradientCame("a"), [Backward("a")]),
            (Counted("a"), [TakeStep()]),
            (StepBegan(), []),
        ],
    ),
    "the next one waits for the next step": (
        0,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), []),
            (GradientCame("a"), [Backward("a")]),
            (Counted("a"), [TakeStep()]),
            (StepBegan(), [Forward("b")]),
        ],
    ),
    "one that fails gives its place to the first that waits": (
        0,
        [(Asked("a"), [Forward("a")]), (Asked("b"), []), (GivenUp("a"), [Forward("b")]), (GivenUp("a"), [])],
    ),
    "when the queue is full one more of the same sender is refused": (
        0,
        [*FILLED, (Asked("late"), [Refuse("late", FULL)])],
    ),
    "a sender with less in the queue takes the place of one that fills it": (
        0,
        [
            (Asked("a", MALLORY), [Forward("a")]),
            *((Asked(name, MALLORY), []) for name in QUEUE),
            (Asked("b", ALICE), [Refuse(QUEUE[-1], OTHERS_WAIT)]),
            (GivenUp("a"), [Forward("b")]),  # it has had no turn yet
        ]
        if QUEUE_BATCHES > 2
        else [],
    ),
    "one of the next step runs forward before, and backward when its step is there": (
        1,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), [Forward("b")]),
            (GradientCame("b"), []),
            (GradientCame("a"), [Backward("a")]),
            (Counted("a"), [TakeStep()]),
            (StepBegan(), [Backward("b")]),
            (Counted("b"), [TakeStep()]),
        ],
    ),
    "one of the next step takes the place of one that fails": (
        1,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), [Forward("b")]),
            (GradientCame("b"), []),
            (GivenUp("a"), [Backward("b")]),
        ],
    ),
    "at the end of a round what waits goes elsewhere and nothing is taken": (
        0,
        [
            *FILLED,
            (Held(), [Refuse(name, END_OF_ROUND) for name in QUEUE]),
            (Asked("late"), [Refuse("late", END_OF_ROUND)]),
            (GradientCame("a"), [Backward("a")]),
            (Counted("a"), [TakeStep()]),
            (StepBegan(), []),
            (Asked("b"), [Forward("b")]),
        ],
    ),
    "what waits for a later step goes elsewhere at the end of a round, and none of the queue moves up": (
        1,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), [Forward("b")]),
            (Asked("c"), []),
            (GradientCame("b"), []),
            (Held(), [Refuse("b", END_OF_ROUND), Refuse("c", END_OF_ROUND)]),
            (GivenUp("b"), []),
        ],
    ),
    "a gradient of a later step that comes after the end of a round is refused": (
        1,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), [Forward("b")]),
            (Held(), []),
            (GradientCame("b"), [Refuse("b", END_OF_ROUND)]),
        ],
    ),
    "with nothing allowed in flight one waits until something is": (
        0,
        [(Allowed(0), []), (Asked("a"), []), (Allowed(1), [Forward("a")])],
    ),
    "when no step comes any more, all that runs may run backward and nobody else begins": (
        1,
        [
            (Asked("a"), [Forward("a")]),
            (Asked("b"), [Forward("b")]),
            (Asked("c"), []),
            (GradientCame("b"), []),
            (Draining(), [Backward("b")]),
            (Counted("b"), []),  # it counts for no step
            (Allowed(2), []),
            (GradientCame("a"), [Backward("a")]),
            (Counted("a"), [TakeStep()]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_of_admission(name: str) -> None:
    staleness, rows = TABLES[name]
    admission = Admission(batch=1, staleness=staleness, in_flight=1 + staleness)
    for event, expected in rows:
        assert admission.handle(event) == expected, event


def test_why_one_more_would_be_refused_is_what_it_is_told_when_it_comes() -> None:
    admission = Admission(batch=1, staleness=0, in_flight=1)
    assert admission.why_busy() is None
    for event, _ in FILLED:
        admission.handle(event)
    assert admission.handle(Asked("late")) == [Refuse("late", admission.why_busy() or "")]
    admission.handle(Held())
    assert admission.handle(Asked("late")) == [Refuse("late", admission.why_busy() or "")]
    admission.handle(StepBegan())
    assert admission.why_busy() is None


def test_the_page_shows_the_ways_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "walks.md").read_text(encoding="utf-8")
    assert diagram() in page, "python tests/unit/admission_diagram.py prints the diagram for docs/walks.md"


def test_every_place_is_reached_and_all_but_the_last_are_left() -> None:
    found = arrows()
    assert {after for _, after in found} == set(Place) - {Place.ASKING}
    assert {before for before, _ in found} == set(Place) - {*AT_REST}
