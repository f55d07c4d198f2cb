"""Draws the phases of `Passage` from what it does: `python tests/unit/passage_diagram.py` prints the diagram."""

from __future__ import annotations

from collections import defaultdict

from passages import life, way_of
from search_diagram import drawn

from node.pipeline.passage import Ended, Phase

LIVES = 600
Arrows = dict[tuple[Phase, Phase], set[str]]


def arrows() -> Arrows:
    """Each change of phase that was seen, with the events that made it; of `Ended`, how it was."""
    found: Arrows = defaultdict(set)
    for seed in range(LIVES):
        before = way_of(seed).machine.phase
        for after, event in ((way.machine.phase, event) for way, event, *_ in life(seed)):
            if after is not before:
                found[before, after].add(type(event.how if isinstance(event, Ended) else event).__name__)
            before = after
    return found


def diagram() -> str:
    return drawn(arrows().items(), Phase.WAITING)


if __name__ == "__main__":
    print(diagram(), end="")
