"""Gives something up and tries again when memory runs out while a microbatch is computed.

A dry step has found out what fits before a node serves, but other programs take memory later. In this order a stage
keeps fewer microbatches in flight, computes fewer sequences at once, and computes activations again. It never goes
back: what was too much once would be again. Called by the compute thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

import torch

from node.model.execution import Execution, described, slices_of
from node.model.replica import Replica
from node.model.resources import free_caches, is_out_of_memory, retried
from node.watch.events import Events
from protocol.errors import OutOfMemory

P = ParamSpec("P")
T = TypeVar("T")
Forwarded: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # leaf, and outputs with their graph
# of leaf, outputs and their gradient, and of leaf and gradient alone; both return the gradient by the inputs
Backward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]
Again: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


class MemoryPolicy(Protocol):
    """Decides what happens when memory runs out in a pass."""

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass that keeps no graph."""

    def forward(self, work: Callable[[torch.Tensor], Forwarded], inputs: torch.Tensor) -> Forwarded:
        """Run a pass whose graph is kept until its backward pass."""

    def backward(
        self, work: Backward, again: Again, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the pass that takes the graph; `again` makes a new one."""


class NoFallback:
    """Leaves it to the caller: what a pass raises is raised."""

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return work(*args, **kwargs)

    def forward(self, work: Callable[[torch.Tensor], Forwarded], inputs: torch.Tensor) -> Forwarded:
        return work(inputs)

    def backward(
        self, work: Backward, again: Again, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        return work(leaf, outputs, gradient)


class OomFallback:
    """Makes a serving replica's passes smaller when memory runs out, and repeats them.

    What is given up is told on the loop that runs when this is made.
    """

    def __init__(self, replica: Replica, recompute: str, events: Events) -> None:
        """`recompute` as the volunteer set it: "auto", "on" or "off"."""
        self._replica = replica
        self._passes = replica.passes
        self._sequences = replica.manifest.inner.sequences
        self._may_recompute = recompute != "off"
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._graphs: list[weakref.ref[torch.Tensor]] = []  # that wait for their backward passes
        self._is_exhausted = False

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass again and again until it fits; `Passes` goes on where one that failed halfway had ended.

        Raises `OutOfMemory` when nothing makes it fit.
        """
        while True:
            try:
                return retried(work, *args, **kwargs)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            self._make_smaller()

    def forward(self, work: Callable[[torch.Tensor], Forwarded], inputs: torch.Tensor) -> Forwarded:
        """Run as `run` does. Raises `OutOfMemory` also while graphs of others are held: these must go first."""
        while True:
            try:
                leaf, outputs = retried(work, inputs)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                self._track_graph(outputs)
                return leaf, outputs
            if held := self._held():
                self._change(self._with_fewer_in_flight(held))
                raise OutOfMemory("the memory is taken by the microbatches that are in flight")
            self._make_smaller()

    def backward(
        self, work: Backward, again: Again, leaf: torch.Tensor, outputs: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Run `work`, which takes the graph and cannot be repeated: `again` makes a new one, as small as can be.

        `again` does not add what is in the gradients already. Raises `OutOfMemory` when that does not fit either.
        """
        try:
            return work(leaf, outputs, gradient)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        free_caches()
        usual = self._passes.execution
        smaller = self._with_fewer_in_flight(self._held() - 1) or self._with_smaller_passes()
        self._passes.execute(replace(usual, at_once=1, recomputes=usual.recomputes or self._may_recompute))
        try:
            return again(leaf, gradient)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory("no memory for a backward pass") from None
        finally:
            self._passes.execute(usual)
            self._change(smaller)

    def _track_graph(self, outputs: torch.Tensor) -> None:
        """Track the graph behind these outputs, if there is one: it is kept until nobody refers to them any more."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        if outputs.requires_grad:
            self._graphs.append(weakref.ref(outputs))

    def _held(self) -> int:
        return sum(graph() is not None for graph in self._graphs)

    def _with_fewer_in_flight(self, fitting: int) -> Execution | None:
        """The way that allows only the `fitting` graphs that are held; None when no more than these are allowed."""
        usual = self._passes.execution
        return replace(usual, in_flight=fitting) if 0 < fitting < usual.in_flight else None

    def _with_smaller_passes(self) -> Execution | None:
        """The next way that takes less memory for one microbatch; None after the last."""
        usual = self._passes.execution
        smaller = [size for size in slices_of(self._sequences) if size < (usual.at_once or self._sequences)]
        if smaller:
            return replace(usual, at_once=smaller[0])
        return replace(usual, recomputes=True) if self._may_recompute and not usual.recomputes else None

    def _make_smaller(self) -> None:
        smaller = self._with_smaller_passes()
        if smaller is None:
            if not self._is_exhausted:
                self._is_exhausted = True
                self._loop.call_soon_threadsafe(self._tell_exhausted)
            raise OutOfMemory("there is no memory for a single microbatch")
        self._change(smaller)

    def _change(self, execution: Execution | None) -> None:
        if execution is not None:
            self._passes.execute(execution)
            self._loop.call_soon_threadsafe(self._tell, execution)

    def _tell(self, execution: Execution) -> None:
        stage = self._replica.stage.index
        way = described(execution, self._replica.manifest, stage)
        sentence = f"Memory ran out: from now on stage {stage} {way}. Training goes on, more slowly."
        self._events.warn(sentence, "made-smaller", **asdict(execution))

    def _tell_exhausted(self) -> None:
        self._events.warn(
            "There is no memory for a single microbatch any more: this node refuses them until there is. Close "
            "other programs, or give it more with --max-memory.",
            "out-of-memory",
        )
