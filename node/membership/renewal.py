"""Keeps a record in the DHT for as long as this node means it: puts it again before it runs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protocol.errors import NolocoError
from protocol.supervision import Supervisor

logger = logging.getLogger(__name__)

RENEWALS_PER_LIFETIME = 3


class Renewal:
    """Mutable state: whether it runs. Without it the record ends after its lifetime, in seconds."""

    def __init__(
        self, name: str, put: Callable[[], Awaitable[object]], lifetime: float, supervisor: Supervisor
    ) -> None:
        """`name` says what is renewed, for those who watch this node."""
        self._name = name
        self._put = put
        self._pause = lifetime / RENEWALS_PER_LIFETIME
        self._group = supervisor.group()
        self._runs = False

    def begin(self) -> None:
        """For a record that was just put; may be repeated."""
        if not self._runs:
            self._runs = True
            self._group.keep(self._name, self._run, "Others may take it for gone.")

    async def end(self) -> None:
        """The record stands for up to a lifetime more. May be repeated, and begun anew."""
        self._runs = False
        await self._group.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            try:
                await self._put()
            except NolocoError as problem:
                logger.debug("A record could not be renewed: %s", problem)
