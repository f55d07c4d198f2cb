"""When memory runs out while a microbatch is computed: what is given up, and trying again.

A rehearsal has found out what fits before a node serves, but other programs take memory later. In this order a stage
keeps fewer microbatches in flight, computes fewer sequences at once, and computes activations again. It never goes
back: what was too much once would be again. Called by the compute thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from node.model.execution import Execution, described, slices_of
from node.model.replica import Replica
from node.model.resources import free_caches, is_out_of_memory, retried
from node.watch.events import Events
from protocol.errors import OutOfMemory

T = TypeVar("T")


def with_fewer_in_flight(execution: Execution, fitting: int) -> Execution | None:
    """`fitting` graphs are held, and there is no room for one more; None when no more than these are allowed."""
    return replace(execution, in_flight=fitting) if 0 < fitting < execution.in_flight else None


def with_smaller_passes(execution: Execution, sequences: int, may_recompute: bool) -> Execution | None:
    """The next way that takes less memory for one microbatch of so many `sequences`; None after the last."""
    smaller = [size for size in slices_of(sequences) if size < (execution.at_once or sequences)]
    if smaller:
        return replace(execution, at_once=smaller[0])
    if may_recompute and not execution.recomputes:
        return replace(execution, recomputes=True)
    return None


class Sparing:
    """Mutable state: how passes are computed, by `execute`; the graphs that wait for their backward passes."""

    def __init__(
        self,
        execution: Callable[[], Execution],
        execute: Callable[[Execution], None],
        sequences: int,
        may_recompute: bool,
        tell: Callable[[Execution | None], object],
    ) -> None:
        """`tell` gets what is done from now on, None once when there is nothing left to give up."""
        self._execution = execution
        self._execute = execute
        self._sequences = sequences
        self._may_recompute = may_recompute
        self._tell = tell
        self._graphs: list[weakref.ref[torch.Tensor]] = []
        self._is_exhausted = False

    def holds(self, outputs: torch.Tensor) -> None:
        """The graph behind these outputs is kept until nobody refers to them any more."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        self._graphs.append(weakref.ref(outputs))

    @property
    def held(self) -> int:
        return sum(graph() is not None for graph in self._graphs)

    def run(self, work: Callable[[], T], keeps_graph: bool = False) -> T:
        """A pass, again and again until it fits.

        Raises `OutOfMemory` when nothing makes it fit; and if it `keeps_graph`, when those of others must go first.
        """
        while True:
            try:
                return retried(work)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if keeps_graph and (held := self.held):
                self._change(with_fewer_in_flight(self._execution(), held))
                raise OutOfMemory("the memory is taken by the microbatches that are in flight")
            self._make_smaller()

    def backward(self, work: Callable[[], T], again: Callable[[], T]) -> T:
        """`work` takes the graph, so that it cannot be repeated: `again` makes a new one, as small as can be."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        free_caches()
        usual = self._execution()
        fewer = with_fewer_in_flight(usual, self.held - 1)
        self._execute(replace(usual, at_once=1, recomputes=usual.recomputes or self._may_recompute))
        try:
            return again()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("no memory for a backward pass") from None
        finally:
            self._execute(usual)
            self._change(fewer or with_smaller_passes(usual, self._sequences, self._may_recompute))

    def _make_smaller(self) -> None:
        smaller = with_smaller_passes(self._execution(), self._sequences, self._may_recompute)
        if smaller is None:
            if not self._is_exhausted:
                self._is_exhausted = True
                self._tell(None)
            raise OutOfMemory("there is no memory for a single microbatch")
        self._change(smaller)

    def _change(self, execution: Execution | None) -> None:
        if execution is not None:
            self._execute(execution)
            self._tell(execution)


def sparing_for(replica: Replica, recompute: str, events: Events) -> Sparing:
    """That of a replica in service; what changes is told on the loop that runs now."""
    passes, manifest, stage = replica.passes, replica.manifest, replica.stage.index
    loop = asyncio.get_running_loop()

    def tell(execution: Execution | None) -> None:
        if execution is None:
            events.warn(
                "There is no memory for a single microbatch any more: this node refuses them until there is. Close "
                "other programs, or give it more with --max-memory.",
                "out-of-memory",
            )
            return
        way = described(execution, manifest, stage)
        sentence = f"Memory ran out: from now on stage {stage} {way}. Training goes on, more slowly."
        events.warn(sentence, "made-smaller", **asdict(execution))

    return Sparing(
        lambda: passes.execution,
        passes.execute,
        manifest.inner.sequences,
        recompute != "off",
        lambda execution: loop.call_soon_threadsafe(tell, execution),
    )
