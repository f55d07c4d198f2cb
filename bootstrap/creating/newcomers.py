"""A seed peer's news for its founder: who joins and leaves, and what is missing before training can begin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from node.membership.discovery import read_stages
from node.membership.view import Member, View
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.signed_manifest import SignedManifest
from protocol.transport.base import Transport

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


class Roll:
    """Tells a founder who joined and left since the last call.

    Mutable state: the stage of each replica when it was called last.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._known: dict[PeerId, int] = {}

    def call(self, members: Sequence[Member]) -> list[str]:
        """A sentence for each one that came or went, and then who is there now; none when nothing has changed."""
        here = {m.peer: m.announcement.stage for m in members if m.announcement.state != "joining"}
        came = [f"…{peer[-8:]} serves stage {s}." for peer, s in here.items() if self._known.get(peer) != s]
        went = [f"…{peer[-8:]} has left stage {s}." for peer, s in self._known.items() if peer not in here]
        self._known = here
        return [*came, *went, self._summary()] if came or went else []

    def _summary(self) -> str:
        counts = [list(self._known.values()).count(stage) for stage in range(self._stages)]
        missing = [str(stage) for stage, count in enumerate(counts) if not count]
        there = ", ".join(f"{count} at stage {stage}" for stage, count in enumerate(counts) if count)
        if not missing:
            return f"All stages are served: {there}."
        need = f"stage {missing[0]}" if len(missing) == 1 else f"stages {', '.join(missing)}"
        return f"Missing before anything is trained: {need}. Here: {there or 'nobody yet'}."


async def tell_newcomers(transport: Transport, signed: SignedManifest, view: View) -> None:
    """Read the records into the view every `LOOK_SECONDS`, for ever, and log what has changed."""
    roll = Roll(signed.manifest.stages)
    while True:
        try:
            await read_stages(transport, signed.run_id, range(signed.manifest.stages), view)
        except NolocoError as problem:
            logger.debug("Looking for members: %s", problem)
        now = transport.now()
        view.expire(now)
        members = [m for stage in range(signed.manifest.stages) for m in view.members(stage, now)]
        for sentence in roll.call(members):
            logger.info(sentence)
        await asyncio.sleep(LOOK_SECONDS)
