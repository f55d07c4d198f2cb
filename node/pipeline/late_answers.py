"""Lets peers finish whose microbatch another peer has answered meanwhile; names those that hold one and hold it."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from node.context import Context
from node.pipeline.conduct import Conduct
from node.pipeline.passage import Action, LetFinish
from protocol.windows import window

MOST_LATE = 4  # at once: each keeps its activations; the one waited for longest makes room
NAMED_SECONDS = 30.0  # that a peer has had a microbatch, at least, before it is named: it may have compiled

Asking: TypeAlias = asyncio.Task[list[Action]]


class LateAnswers:
    """The requests whose answers came too late to be of use, until they come or their time is over.

    A late answer tells how slow its peer is, and the work counts there. One that never comes counts against the peer.
    Mutable state: the requests under way, the oldest first.
    """

    def __init__(self, context: Context, conduct: Conduct) -> None:
        self._elapsed = context.view.elapsed
        self._conduct = conduct
        self._tasks = context.supervisor.group()
        self._under_way = dict[Asking, LetFinish]()

    @window
    def __repr__(self) -> str:
        return f"Late: {len(self._under_way)} of {MOST_LATE}"

    def let_finish(self, asking: Asking, late: LetFinish) -> None:
        """See a request to its end, and cancel the oldest one where there are too many."""
        self._under_way[asking] = late
        if len(self._under_way) > MOST_LATE:
            next(iter(self._under_way)).cancel()
        self._tasks.spawn(self._see(asking, late), "waiting for a late answer")

    async def _see(self, asking: Asking, late: LetFinish) -> None:
        named_at = late.asked + max(NAMED_SECONDS, 3 * late.usual)
        try:
            done, _ = await asyncio.wait([asking], timeout=max(0.0, named_at - self._elapsed()))
            if not done:
                self._conduct.record_holding(late.peer, self._elapsed() - late.asked, late.took)
                await asyncio.wait([asking])
            if asking.cancelled() or asking.result():  # all that is done for a late one is to blame its peer
                self._conduct.record_bad(late.peer)
        finally:
            asking.cancel()
            self._under_way.pop(asking, None)
