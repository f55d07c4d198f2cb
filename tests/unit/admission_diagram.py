"""Draws the way of a microbatch through `Admission`: `python tests/unit/admission_diagram.py` prints the diagram.

A machine hears thousands of random events; an arrow is what became of a microbatch, named by the events that made it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from enum import Enum, auto

from search_diagram import drawn

from node.pipeline import admission
from node.pipeline.step_places import Sender
from protocol.ground import PeerId

BATCH, LIVES, EVENTS = 3, 120, 150
SENDERS = [Sender(PeerId(name), name) for name in ("alice", "mallory", "mallory")]


class Place(Enum):
    """The place of a microbatch at a replica, as its sender sees it."""

    ASKING = auto()
    QUEUED = auto()
    FORWARD = auto()  # it runs forward, or is at the next stage
    NEXT_STEP = auto()  # its gradient is here, and waits for its step
    BACKWARD = auto()
    COUNTED = auto()
    REFUSED = auto()
    GIVEN_UP = auto()


AT_REST = (Place.COUNTED, Place.REFUSED, Place.GIVEN_UP)
Arrows = dict[tuple[Place, Place], set[str]]


class Life:
    """The life of one machine whose microbatches come, fail and get on at random. Mutable: all that it does."""

    def __init__(self, seed: int, arrows: Arrows) -> None:
        self._dice = random.Random(seed)
        self._arrows = arrows
        self._staleness = seed % 2
        self._is_last = not self._staleness and seed % 4 == 0  # of the stages: no gradient comes from behind
        self._machine = admission.Admission(BATCH, self._staleness, in_flight=2 * BATCH)
        self._places: dict[str, Place] = {}

    def _move(self, microbatch: str, place: Place, event: admission.Event) -> None:
        before = self._places[microbatch]
        self._arrows[before, place].add(type(event).__name__)
        self._places[microbatch] = place

    def _hear(self, event: admission.Event) -> None:
        """Let the machine hear the event; a microbatch of which nothing follows waits, or is over."""
        actions = self._machine.handle(event)
        for action in actions:
            match action:
                case admission.Forward(microbatch):
                    self._move(microbatch, Place.FORWARD, event)
                case admission.Backward(microbatch):
                    self._move(microbatch, Place.BACKWARD, event)
                case admission.Refuse(microbatch, _):
                    self._move(microbatch, Place.REFUSED, event)
        named = {action.microbatch for action in actions if not isinstance(action, admission.TakeStep)}
        match event:
            case admission.Asked(microbatch) if microbatch not in named:
                self._move(microbatch, Place.QUEUED, event)
            case admission.GradientCame(microbatch) if microbatch not in named:
                self._move(microbatch, Place.NEXT_STEP, event)
            case admission.Counted(microbatch):
                self._move(microbatch, Place.COUNTED, event)
            case admission.GivenUp(microbatch):
                self._move(microbatch, Place.GIVEN_UP, event)

    def live(self) -> None:
        """Let things happen, and at last drain the machine."""
        for _ in range(EVENTS):
            self._go_on()
        self._hear(admission.Draining())

    def _go_on(self) -> None:
        dice, machine = self._dice, self._machine
        here = [name for name, place in self._places.items() if place not in AT_REST]
        if machine.is_complete and dice.random() < 0.5:
            self._hear(admission.StepBegan())
        elif not here or dice.random() < 0.4:
            name = f"m{len(self._places)}"
            self._places[name] = Place.ASKING
            self._hear(admission.Asked(name, dice.choice(SENDERS)))
        elif dice.random() < 0.05:
            bounds: list[admission.Event] = [
                admission.Allowed(dice.randrange(1, 2 * BATCH + 1)),
                admission.Held(),
            ]
            self._hear(dice.choice(bounds))
        elif dice.random() < 0.05:
            self._hear(admission.GivenUp(dice.choice(here)))
        else:
            self._get_on(dice.choice(here))

    def _get_on(self, microbatch: str) -> None:
        match self._places[microbatch]:
            case Place.FORWARD if not self._is_last:
                self._hear(admission.GradientCame(microbatch))
            case Place.FORWARD | Place.BACKWARD:
                self._hear(admission.Counted(microbatch))


def arrows() -> Arrows:
    """Each change of a microbatch's place that was seen, with the events that made it."""
    found: Arrows = defaultdict(set)
    for seed in range(LIVES):
        Life(seed, found).live()
    return found


def diagram() -> str:
    return drawn(arrows().items(), Place.ASKING)


if __name__ == "__main__":
    print(diagram(), end="")
