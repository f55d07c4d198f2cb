"""Holds what one pair exchanges in one round: how far it is, and the tasks that send."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, NoReturn

import torch

from node.model.fragment import Fragment
from node.rounds.contribution import IncomingUpdate, OutgoingUpdate
from node.rounds.meeting import Pair
from protocol.messages.training import Part
from protocol.supervision import Supervisor, Work, cancelled


class PairExchange:
    """The exchange with one partner in one round: both contributions, and the tasks that send the own one."""

    def __init__(
        self,
        pair: Pair,
        own: Fragment,
        outgoing: OutgoingUpdate,
        incoming: IncomingUpdate,
        tasks: Supervisor,
    ) -> None:
        self._tasks = tasks
        self.pair = pair
        self.own = own  # what of this replica is averaged
        self.outgoing = outgoing
        self.incoming = incoming
        self.phi_sample: torch.Tensor | None = None  # the partner's
        self.received = asyncio.Event()  # all of the partner's contribution is there
        # where contributions are read beside the own weights: which blocks the partner could not read, and the pair
        self.unread_there: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self.unread: torch.Tensor | None = None
        self.urgent = asyncio.Event()  # training waits for it
        self.turn = asyncio.Lock()  # of the one piece that goes while it is not
        self.sending: dict[Part, asyncio.Task[None]] = {}
        self.pieces_sent = 0  # and taken by the partner
        self.bytes_sent = 0
        self.is_over = False  # nothing is sent any more and nothing taken

    def __repr__(self) -> str:
        partner, pair, incoming = self.pair.partner[-8:], self.pair.name[:8], self.incoming
        sent = f"{self.pieces_sent} of {incoming.pieces} pieces sent, {incoming.pieces_in} received"
        return f"<PairExchange with …{partner}, pair {pair}: {sent}{', over' if self.is_over else ''}>"

    def send(self, part: Part, sending: Work[None]) -> None:
        """Send a part in the background; `sending` is dropped when that was begun before."""
        if part in self.sending:
            sending.close()
            return
        self.sending[part] = self._tasks.start(sending, "sending a contribution")

    async def make_way(self, seconds: float) -> None:
        """Pause for other traffic, as long as nothing waits for this exchange."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.urgent.wait()

    async def both_ways(self, watch: Work[NoReturn]) -> None:
        """Wait until all is sent and all received. Raises what ended the sending, or what `watch` raises."""
        watching = self._tasks.start(watch, "watching the partner")
        receiving = self._tasks.start(self.received.wait(), "waiting for the partner's contribution")
        working: set[asyncio.Task[None] | asyncio.Task[Literal[True]]] = {receiving, *self.sending.values()}
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
