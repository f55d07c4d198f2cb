"""Which way of computing a microbatch fits a memory: pure, from what each way costs.

The run fixes how many sequences a microbatch has. A device too small for one first keeps fewer microbatches in
flight, then computes activations again instead of keeping them, then takes a microbatch in slices of fewer sequences;
the result is the same but for rounding. Each is slower than the one before it, so the first that fits is taken. At
the last stage slices cost no arithmetic, since no graph is kept between the passes, and come before recomputation.
In a ring there is no such stage: what the last one computes goes on to the first one's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from node.model.memory_model import MicrobatchBytes, estimated, least_in_flight, most_in_flight, sliced
from protocol.manifest import Manifest

# of the memory that is left, for activations: what is freed leaves gaps, and kernels need some of their own
USABLE = 0.8


@dataclass(frozen=True)
class Way:
    """`at_once` sequences are computed together, of a whole microbatch where it is 0."""

    recomputes: bool
    at_once: int
    least: int  # microbatches in flight, or the next way is better


@dataclass(frozen=True)
class Choice:
    way: Way
    in_flight: int


CostOf = Callable[[Way], MicrobatchBytes | None]  # None: it cannot be had


def ways(manifest: Manifest, stage: int, recompute: str = "auto") -> Iterator[Way]:
    """All ways that the volunteer's `recompute` ("auto", "on", "off") allows, the fastest first."""
    least = least_in_flight(manifest, stage)
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[recompute]
    slices = slices_of(manifest.inner.sequences)
    if stage == manifest.hops - 1:
        yield from (Way(recomputes, at_once, 1) for recomputes in again for at_once in (0, *slices))
        return
    yield from (Way(recomputes, 0, least) for recomputes in again)
    if recompute == "off":  # slices run forward twice
        yield Way(False, 0, 1)
        return
    yield from (Way(recomputes, at_once, least) for recomputes in again for at_once in slices)
    yield from (Way(True, at_once, 1) for at_once in (0, *slices))


def slices_of(sequences: int) -> list[int]:
    """Sizes that cut a microbatch into 2, 3, … equal parts, the largest first."""
    return sorted({-(-sequences // parts) for parts in range(2, sequences + 1)}, reverse=True)


def choose(manifest: Manifest, stage: int, ways: Sequence[Way], cost_of: CostOf, room: int) -> Choice | None:
    """The first way of which enough microbatches fit into `room` bytes, and as many of them as do; None if none."""
    usable, most = int(room * USABLE), most_in_flight(manifest, stage)
    for way in ways:
        cost = cost_of(way)
        if cost is None or cost.peak > usable:
            continue
        fitting = most if not cost.kept else 1 + (usable - cost.peak) // cost.kept
        if fitting >= way.least:
            return Choice(way, min(fitting, most))
    return None


def by_formula(manifest: Manifest, stage: int, precision: str) -> Callable[[Way], MicrobatchBytes]:
    """What each way costs before anything was measured."""

    def cost_of(way: Way) -> MicrobatchBytes:
        sequences = way.at_once or manifest.inner.sequences
        cost = estimated(manifest, stage, sequences, way.recomputes, precision)
        return sliced(manifest, stage, cost.peak) if way.at_once else cost

    return cost_of


def least_activations(
    manifest: Manifest, stage: int, recompute: str = "auto", precision: str = "fp32"
) -> int:
    """Bytes that must be left for activations, or no way fits, by formula."""
    cost_of = by_formula(manifest, stage, precision)
    return int(min(cost_of(way).peak for way in ways(manifest, stage, recompute) if way.least == 1) / USABLE)
