"""Keeps a record in the DHT for as long as this node means it: puts it again before it runs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protocol.errors import NolocoError

logger = logging.getLogger(__name__)

RENEWALS_PER_LIFETIME = 3


class Renewal:
    """Mutable state: the task that renews. Without it the record ends after its lifetime, in seconds."""

    def __init__(self, put: Callable[[], Awaitable[object]], lifetime: float) -> None:
        self._put = put
        self._pause = lifetime / RENEWALS_PER_LIFETIME
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """For a record that was just put; may be repeated."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """The record stands for up to a lifetime more. May be repeated, and begun anew."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            try:
                await self._put()
            except NolocoError as problem:
                logger.debug("A record could not be renewed: %s", problem)
