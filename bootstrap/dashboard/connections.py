"""Connections of browsers: one that asks for nothing keeps nobody else out."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 256
HEAD_SECONDS = (
    5.0  # for the head of a request, from the connection or the last answer on; a browser sends it at once
)


class PatientConnection(H11Protocol):
    """A connection that ends when no whole request head came for `HEAD_SECONDS`, however the bytes trickle in.

    Where there are `MOST_CONNECTIONS`, the one that has waited longest for a head gives way to a new one; only when
    all of them are being answered is the new one refused, with 503.
    Mutable state: since when no request is being answered, and the timer that ends the connection.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_since = 0.0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_to_wait()
        while len(self.connections) >= MOST_CONNECTIONS:
            idle = [one for one in self.connections if isinstance(one, PatientConnection) and one.is_idle]
            longest = min(
                (one for one in idle if one is not self), key=lambda one: one._idle_since, default=None
            )
            if longest is None:
                return
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._begin_to_wait()
        super().on_response_complete()  # may begin the next request, if that is here already
        if not self.is_idle:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _begin_to_wait(self) -> None:
        self._stop_waiting()
        self._idle_since = self.loop.time()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
