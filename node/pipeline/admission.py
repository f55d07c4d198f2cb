"""The admission of microbatches to inner steps: events in, actions out. Pure.

A microbatch admitted to a step runs forward and backward at that step's weights. The weights change only when
the gradients of all admitted ones are in. With a staleness of one, some of the next step's may run forward before
that; their backward passes wait until it has happened, so that each step still takes exactly its batch.

`StepPlaces` says which of them have places; here is what follows for each: it may run forward, it may run backward,
or it is refused as busy, so that its sender asks another peer. The daemon (`Gate`) and the simulator drive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias, assert_never

from node.model.memory_model import QUEUE_BATCHES
from node.pipeline.step_places import OWN, Decision, Sender, StepPlaces

END_OF_ROUND = "this replica is at the end of its round"
OTHERS_WAIT = "other senders' microbatches wait here"

# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A microbatch asks for a place."""

    microbatch: str
    sender: Sender = OWN


@dataclass(frozen=True, slots=True)
class GradientCame:
    """The next stage's gradient is here: the backward pass may follow."""

    microbatch: str


@dataclass(frozen=True, slots=True)
class Counted:
    """The backward pass is done: the gradient is in."""

    microbatch: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The microbatch failed, or nobody waits for it any more. May be repeated, also after it was refused."""

    microbatch: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The bound on microbatches between their forward and backward passes is `in_flight` from now on."""

    in_flight: int


@dataclass(frozen=True, slots=True)
class StepBegan:
    """The weights have changed: the next step takes its batch."""


@dataclass(frozen=True, slots=True)
class Held:
    """The round ends: until the next step microbatches are refused, so that the partner gets the work it needs."""


@dataclass(frozen=True, slots=True)
class Draining:
    """No step comes any more: nothing new is admitted, and all that runs may run backward."""


Event: TypeAlias = Asked | GradientCame | Counted | GivenUp | Allowed | StepBegan | Held | Draining

# --- actions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """Let the microbatch run forward."""

    microbatch: str


@dataclass(frozen=True, slots=True)
class Backward:
    """Let the microbatch run backward."""

    microbatch: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the microbatch as busy; it has no place any more."""

    microbatch: str
    why: str


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Take the inner step: the gradients of exactly its batch are in."""


Action: TypeAlias = Forward | Backward | Refuse | TakeStep

# --- the machine ------------------------------------------------------------------------------------


class _At(Enum):
    """Where a microbatch is here."""

    QUEUE = auto()
    WORK = auto()  # it runs forward, is at the next stage, or runs backward
    STEP = auto()  # its gradient is here, and waits for its step


class Admission:
    """Admits microbatches to the inner steps of one replica.

    Mutable state: where each microbatch is, in the order of asking, and whether anything is admitted.
    """

    def __init__(self, batch: int, staleness: int, in_flight: int) -> None:
        """`in_flight` is how many may be between their forward and backward passes."""
        self._places = StepPlaces(batch, QUEUE_BATCHES * batch, staleness * batch, in_flight)
        self._here: dict[str, _At] = {}
        self._held = False
        self._draining = False

    def __repr__(self) -> str:
        places = self._places
        state = ", draining" if self._draining else ", held" if self._held else ""
        return (
            f"<Admission: {places.counted} of {places.batch} gradients in, {places.running} running, "
            f"{places.waiting} waiting{state}>"
        )

    # --- a look at it -------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return self._places.batch

    @property
    def running(self) -> int:
        return self._places.running

    @property
    def waiting(self) -> int:
        """The number of microbatches in the queue."""
        return self._places.waiting

    @property
    def counted(self) -> int:
        """The number of microbatches of this step that have their gradients in."""
        return self._places.counted

    @property
    def is_held(self) -> bool:
        return self._held

    @property
    def is_complete(self) -> bool:
        """Return whether this step has its batch, and waits to be taken."""
        return self._places.complete

    def before(self, microbatch: str) -> int:
        """The number of microbatches before it, while it waits for its forward pass."""
        return self._places.before(microbatch)

    def why_busy(self) -> str | None:
        """Return why one more would be refused; None if it would be taken."""
        if self._held:
            return END_OF_ROUND
        if self.waiting >= self._places.queue_limit:
            return f"{self.waiting} microbatches wait here already"
        return None

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        """Return what follows from the event, in this order."""
        places = self._places
        match event:
            case Asked(microbatch, sender):
                return self._asked(microbatch, sender)
            case GradientCame(microbatch):
                return self._gradient_came(microbatch)
            case Counted(microbatch):
                return self._counted(microbatch)
            case GivenUp(microbatch):
                self._here.pop(microbatch, None)
                return self._moved(places.release(microbatch))
            case Allowed(in_flight):
                return [] if self._draining else self._moved(places.allow(in_flight))
            case StepBegan():
                self._held = False
                return self._moved(places.next_step())
            case Held():
                self._held = True
                return self._turn_away()
            case Draining():
                self._draining = True
                places.allow(0)
                waiting = [name for name, at in self._here.items() if at is _At.STEP]
                return [self._at_work(name, Backward) for name in waiting]
        assert_never(event)

    def _asked(self, microbatch: str, sender: Sender) -> list[Action]:
        actions: list[Action] = []
        if self._held:
            return [Refuse(microbatch, END_OF_ROUND)]
        decision = self._places.request(microbatch, sender)
        if decision is Decision.FULL and (out := self._places.displace(sender)) is not None:
            del self._here[out]
            actions.append(Refuse(out, OTHERS_WAIT))
            decision = self._places.request(microbatch, sender)
        if decision is Decision.FULL:
            return [*actions, Refuse(microbatch, f"{self.waiting} microbatches wait here already")]
        if decision is Decision.QUEUED:
            self._here[microbatch] = _At.QUEUE
            return actions
        return [*actions, self._at_work(microbatch, Forward)]

    def _gradient_came(self, microbatch: str) -> list[Action]:
        if self._draining or self._places.is_of_this_step(microbatch):
            return [Backward(microbatch)]
        if self._held:
            return self._refuse([microbatch])
        self._here[microbatch] = _At.STEP
        return []

    def _counted(self, microbatch: str) -> list[Action]:
        del self._here[microbatch]
        if self._draining and not self._places.is_of_this_step(microbatch):
            return self._moved(self._places.release(microbatch))
        actions = self._moved(self._places.done(microbatch))
        return [*actions, TakeStep()] if self.is_complete else actions

    def _moved(self, names: Sequence[str]) -> list[Action]:
        """Return what those may do whose places are better than before."""
        actions: list[Action] = []
        for name in names:
            if self._here[name] is _At.QUEUE:
                actions.append(self._at_work(name, Forward))
            elif self._here[name] is _At.STEP and self._places.is_of_this_step(name):
                actions.append(self._at_work(name, Backward))
        return actions

    def _at_work(self, microbatch: str, how: type[Forward | Backward]) -> Action:
        self._here[microbatch] = _At.WORK
        return how(microbatch)

    def _turn_away(self) -> list[Action]:
        return self._refuse([name for name, at in self._here.items() if at is not _At.WORK])

    def _refuse(self, names: Sequence[str]) -> list[Action]:
        """Refuse microbatches for the end of the round. Those of the queue go first: none of it moves up."""
        for name in sorted(names, key=lambda name: self._here[name] is not _At.QUEUE):
            del self._here[name]
            self._places.release(name)
        return [Refuse(name, END_OF_ROUND) for name in names]
