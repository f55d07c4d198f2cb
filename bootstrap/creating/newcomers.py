"""A seed peer's news for its founder: who joins and leaves, and what is missing before training can begin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from node.membership.discovery import read_stages
from node.membership.view import Member, View
from node.watch.words import called, missing_sentence, waiting_sentence
from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages.peers import Awaited, GetStats
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
SAVE_LOOKS = 12
ASK_DEADLINE = 3.0
MOST_ASKED = 8


class Roll:
    """Tells a founder who joined and left since the last call.

    Mutable state: the stage of each replica when it was called last, and its name.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._known: dict[PeerId, int] = {}
        self._names: dict[PeerId, str] = {}

    def call(self, members: Sequence[Member]) -> list[str]:
        """A sentence for each one that came or went, and then who is there now; none when nothing has changed."""
        here = {m.peer: m.announcement.stage for m in members if m.announcement.state != "joining"}
        names = {m.peer: called(m.announcement.name, m.peer) for m in members}
        came = [f"{names[peer]} serves stage {s}." for peer, s in here.items() if self._known.get(peer) != s]
        known = {**self._names, **names}
        went = [f"{known[peer]} has left stage {s}." for peer, s in self._known.items() if peer not in here]
        self._known, self._names = here, {peer: names[peer] for peer in here}
        return [*came, *went, self._summary()] if came or went else []

    def _summary(self) -> str:
        counts = [list(self._known.values()).count(stage) for stage in range(self._stages)]
        missing = [stage for stage, count in enumerate(counts) if not count]
        there = ", ".join(f"{count} at stage {stage}" for stage, count in enumerate(counts) if count)
        if not missing:
            return f"All stages are served: {there}."
        return f"{missing_sentence(missing)} Here: {there or 'nobody yet'}."


class Waiting:
    """Tells a founder of newcomers that wait for a stage to return.

    Mutable state: what each was found to wait for.
    """

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._told: dict[PeerId, Awaited] = {}

    async def ask(self, members: Sequence[Member]) -> list[str]:
        """Ask those that join, the first few, whom they wait for; a sentence for each that did not before."""
        waiting = [m for m in members if m.announcement.state == "joining"][:MOST_ASKED]
        sentences, joining = [], {m.peer: called(m.announcement.name, m.peer) for m in waiting}
        for peer, name in joining.items():
            try:
                stats, _ = await self._rpc.call(peer, GetStats(), deadline=ASK_DEADLINE)
            except NolocoError:
                continue
            if stats.awaited is not None and self._told.get(peer) != stats.awaited:
                self._told[peer] = stats.awaited
                sentence = waiting_sentence(stats.awaited, self._rpc.transport.now())
                sentences.append(f"{name} joins. {sentence}")
        for peer in self._told.keys() - joining.keys():
            del self._told[peer]
        return sentences


async def _save_nothing() -> None:
    """Keep nothing of what was read."""


async def tell_newcomers(
    rpc: Rpc, signed: SignedManifest, view: View, save: Callable[[], Awaitable[None]] = _save_nothing
) -> None:
    """Read the records into the view every `LOOK_SECONDS`, for ever, and log what has changed.

    Every `SAVE_LOOKS` looks it calls `save`, for what was read.
    """
    transport, roll, waiting = rpc.transport, Roll(signed.manifest.stages), Waiting(rpc)
    for look in count(1):
        try:
            await read_stages(transport, signed.run_id, range(signed.manifest.stages), view)
            if look % SAVE_LOOKS == 0:
                await save()
        except NolocoError as problem:
            logger.debug("Looking for members: %s", problem)
        now = transport.now()
        view.expire(now)
        members = [m for stage in range(signed.manifest.stages) for m in view.members(stage, now)]
        for sentence in [*roll.call(members), *await waiting.ask(members)]:
            logger.info(sentence)
        await asyncio.sleep(LOOK_SECONDS)
