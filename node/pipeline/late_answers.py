"""Lets peers finish whose microbatch another peer has answered meanwhile; names those that hold one and hold it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from node.context import Context
from protocol.errors import DeadlineExceeded, NolocoError, WireError
from protocol.ground import PeerId
from protocol.peer_limits import PeerTable
from protocol.supervision import seen
from protocol.windows import window

logger = logging.getLogger(__name__)

MOST_LATE = 4  # at once: each keeps its activations; the one waited for longest makes room
NAMED_SECONDS = 30.0  # that a peer has had a microbatch, at least, before it is named: it may have compiled
MOST_NAMED = 256  # peers, each once

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
    Mutable state: the requests under way, the oldest first, and the peers that were named.
    """

    def __init__(self, context: Context, stage: int, held: Callable[[PeerId], None]) -> None:
        """`stage` is that of the peers; `held` is called with each that kept a microbatch for all of its time."""
        self._context = context
        self._stage = stage
        self._held = held
        self._tasks = context.supervisor.group()
        self._under_way = OrderedDict[Asking, Late]()
        self._named = PeerTable[None](MOST_NAMED)

    @window
    def __repr__(self) -> str:
        return f"Late: {len(self._under_way)} of {MOST_LATE} | Named: {len(self._named)}"

    def let_finish(self, asking: Asking, late: Late) -> None:
        """See a request to its end, and cancel the oldest one where there are too many."""
        asking.add_done_callback(seen)
        self._under_way[asking] = late
        if len(self._under_way) > MOST_LATE:
            next(iter(self._under_way)).cancel()
        self._tasks.spawn(self._see(asking, late), "waiting for a late answer")

    async def _see(self, asking: Asking, late: Late) -> None:
        elapsed = self._context.view.elapsed
        named_at = late.asked + max(NAMED_SECONDS, 3 * late.usual)
        try:
            done, _ = await asyncio.wait([asking], timeout=max(0.0, named_at - elapsed()))
            if not done:
                self._name(late)
                await asyncio.wait([asking])
            if asking.cancelled():
                self._held(late.peer)
            else:
                asking.result()
        except (DeadlineExceeded, WireError):
            self._held(late.peer)
        except NolocoError:  # refused or gone: it holds nothing
            logger.debug("A late answer of peer %s will not come", late.peer[-8:])
        finally:
            asking.cancel()
            self._under_way.pop(asking, None)

    def _name(self, late: Late) -> None:
        if late.peer in self._named:
            return
        self._named[late.peer] = None
        held = self._context.view.elapsed() - late.asked
        self._context.events.warn(
            f"Peer {late.peer[-8:]} of stage {self._stage} has had a microbatch for {held:.0f} s that another one "
            f"answered within {late.took:.1f} s. What it keeps for long goes to others, too. If that peer is yours, "
            "look at its log.",
            "held",
            peer=late.peer,
            seconds=round(held, 1),
        )
