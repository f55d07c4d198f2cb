"""The best loss of a run in node.json, so that a node that was started again shows a jump as one."""

from __future__ import annotations

from contextlib import suppress

from node.context import Context
from node.storage.state_directory import StateDirectory
from protocol.errors import StateError
from protocol.messages.peers import LossBest
from protocol.records.announcement import MOST_FIGURE
from protocol.windows import window

FACT = "best_loss"


class KeptBest:
    """The best loss in a state directory.

    Mutable state: the stage's context into which the best was recalled, and what is in the file.
    """

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._of: Context | None = None
        self._kept: object = None

    @window
    def __repr__(self) -> str:
        return f"Kept: {self._kept or 'nothing'}"

    def recall(self, context: Context) -> None:
        """Take up the best of earlier lives, once for each stage that is served."""
        if self._of is context:
            return
        self._of, self._kept = context, self._state.facts().get(FACT)
        best = best_in(self._kept, context.run_id)
        if best is not None:
            context.counters.losses.recall(best, context.view.elapsed(), context.transport.now())

    def save(self, context: Context) -> None:
        """Write the best down if it is another; a disk that is full has been reported by others."""
        best = context.counters.losses.best(context.view.elapsed(), context.transport.now())
        if best is None:
            return
        fact = {"run": context.run_id, "loss": round(best.loss, 6), "time": round(best.time)}
        if fact != self._kept:
            with suppress(StateError):
                self._state.remember(**{FACT: fact})
                self._kept = fact


def best_in(fact: object, run_id: str) -> LossBest | None:
    """The best loss of the run in a fact of node.json; None where it has none."""
    if not isinstance(fact, dict) or fact.get("run") != run_id:
        return None
    numbers = [fact.get(name) for name in ("loss", "time")]
    known = [float(n) for n in numbers if isinstance(n, int | float) and abs(n) <= MOST_FIGURE]  # NaN is not
    return LossBest(*known) if len(known) == len(numbers) else None
