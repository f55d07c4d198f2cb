"""Lets peers finish whose microbatch another peer has answered meanwhile; names those that hold one and hold it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeAlias

import torch

from node.context import Context
from node.pipeline.conduct import Conduct
from protocol.errors import DeadlineExceeded, NolocoError, WireError
from protocol.ground import PeerId
from protocol.supervision import seen
from protocol.windows import window

logger = logging.getLogger(__name__)

MOST_LATE = 4  # at once: each keeps its activations; the one waited for longest makes room
NAMED_SECONDS = 30.0  # that a peer has had a microbatch, at least, before it is named: it may have compiled

Asking: TypeAlias = asyncio.Task[tuple[float, torch.Tensor]]


@dataclass(frozen=True)
class Late:
    """A request that goes on although another peer's answer was taken. Times are `View.elapsed`."""

    peer: PeerId
    asked: float
    took: float  # seconds that the other peer needed
    usual: float  # seconds after which the other peer was asked


class LateAnswers:
    """The requests whose answers came too late to be of use, until they come or their time is over.

    A late answer tells how slow its peer is, and the work counts there. One that never comes counts against the peer.
    Mutable state: the requests under way, the oldest first.
    """

    def __init__(self, context: Context, conduct: Conduct) -> None:
        self._elapsed = context.view.elapsed
        self._conduct = conduct
        self._tasks = context.supervisor.group()
        self._under_way = dict[Asking, Late]()

    @window
    def __repr__(self) -> str:
        return f"Late: {len(self._under_way)} of {MOST_LATE}"

    def let_finish(self, asking: Asking, late: Late) -> None:
        """See a request to its end, and cancel the oldest one where there are too many."""
        asking.add_done_callback(seen)
        self._under_way[asking] = late
        if len(self._under_way) > MOST_LATE:
            next(iter(self._under_way)).cancel()
        self._tasks.spawn(self._see(asking, late), "waiting for a late answer")

    async def _see(self, asking: Asking, late: Late) -> None:
        named_at = late.asked + max(NAMED_SECONDS, 3 * late.usual)
        try:
            done, _ = await asyncio.wait([asking], timeout=max(0.0, named_at - self._elapsed()))
            if not done:
                self._conduct.record_holding(late.peer, self._elapsed() - late.asked, late.took)
                await asyncio.wait([asking])
            if asking.cancelled():
                self._conduct.record_bad(late.peer)
            else:
                asking.result()
        except (DeadlineExceeded, WireError):
            self._conduct.record_bad(late.peer)
        except NolocoError:  # refused or gone: it holds nothing
            logger.debug("A late answer of peer %s will not come", late.peer[-8:])
        finally:
            asking.cancel()
            self._under_way.pop(asking, None)
