"""One pair's exchange as this replica sees it: what goes out, what has come in, how urgent it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

import torch

from node.rounds.contribution import Contribution
from node.rounds.offer import Offer
from node.rounds.pairing import Pair
from protocol.messages import Part


class Swap:
    """Mutable state: both contributions, the tasks that send the own one, bytes sent, the sample of φ."""

    def __init__(self, pair: Pair, offer: Offer, partners: Contribution) -> None:
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
        task = self.sending[part] = asyncio.get_running_loop().create_task(sending)
        task.add_done_callback(_see_failure)

    async def make_way(self, seconds: float) -> None:
        """Pause for other traffic, as long as nothing waits for this exchange."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.urgent.wait()

    async def both_ways(self, watch: Coroutine[Any, Any, NoReturn]) -> None:
        """Wait until all is sent and all received. Raises what ended the sending, or what `watch` raises."""
        watching = asyncio.get_running_loop().create_task(watch)
        working = asyncio.get_running_loop().create_task(self._work_done())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            await (working if working.done() else watching)
        finally:
            await cancelled([working, watching])

    async def _work_done(self) -> None:
        await asyncio.gather(*self.sending.values(), self.received.wait())

    def end(self) -> list[asyncio.Task[None]]:
        """Stop sending; once the returned tasks have ended, nothing refers to the weights any more."""
        self.is_over = True
        for task in self.sending.values():
            task.cancel()
        return list(self.sending.values())


async def all_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them at once. When one fails the others are cancelled; none runs any more when this returns."""
    tasks = [asyncio.get_running_loop().create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _see_failure(task: asyncio.Task[None]) -> None:
    """Whoever waits for the exchange is told of it; one that is dropped has nobody to tell."""
    if not task.cancelled():
        task.exception()
