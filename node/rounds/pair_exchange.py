"""One pair's exchange as this replica sees it: what goes out, what has come in, how urgent it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, NoReturn

import torch

from node.rounds.incoming_update import IncomingUpdate
from node.rounds.outgoing_update import OutgoingUpdate
from node.rounds.pairing import Pair
from protocol.messages import Part
from protocol.supervision import Supervisor, cancelled


class PairExchange:
    """Mutable state: both contributions, the tasks that send the own one, bytes sent, the sample of φ."""

    def __init__(
        self, pair: Pair, offer: OutgoingUpdate, partners: IncomingUpdate, tasks: Supervisor
    ) -> None:
        self._tasks = tasks
        self.pair = pair
        self.offer = offer
        self.partners = partners
        self.phi_sample: torch.Tensor | None = None  # the partner's
        self.received = asyncio.Event()  # all of the partner's contribution is there
        self.urgent = asyncio.Event()  # training waits for it
        self.turn = asyncio.Lock()  # of the one piece that goes while it is not
        self.sending: dict[Part, asyncio.Task[None]] = {}
        self.bytes_sent = 0
        self.is_over = False  # nothing is sent any more and nothing taken

    def send(self, part: Part, sending: Coroutine[Any, Any, None]) -> None:
        """Send a part in the background; `sending` is dropped when that was begun before."""
        if part in self.sending:
            sending.close()
            return
        self.sending[part] = self._tasks.start(sending, "sending a contribution")

    async def make_way(self, seconds: float) -> None:
        """Pause for other traffic, as long as nothing waits for this exchange."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.urgent.wait()

    async def both_ways(self, watch: Coroutine[Any, Any, NoReturn]) -> None:
        """Wait until all is sent and all received. Raises what ended the sending, or what `watch` raises."""
        watching = self._tasks.start(watch, "watching the partner")
        receiving = self._tasks.start(self.received.wait(), "waiting for the partner's contribution")
        working: set[asyncio.Task[Any]] = {receiving, *self.sending.values()}
        try:
            while working:
                done, _ = await asyncio.wait({*working, watching}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                working -= done
        finally:
            await cancelled([receiving, watching])

    def end(self) -> list[asyncio.Task[None]]:
        """Stop sending; once the returned tasks have ended, nothing refers to the weights any more."""
        self.is_over = True
        for task in self.sending.values():
            task.cancel()
        return list(self.sending.values())
