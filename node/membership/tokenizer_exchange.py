"""The run's tokenizer.json among peers: seed peer and members give it to whoever asks, in pieces.

Whose pieces they were does not matter: the whole is what the signed manifest names by its hash, or it is nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from node.data.tokenizer import identity_of, load_tokenizer, read_tokenizer
from node.membership.view import View
from node.model.state_directory import StateDirectory
from protocol.errors import NolocoError, Refused, TokenizerError, WireError
from protocol.manifest import BYTES, Manifest
from protocol.messages.peers import TOKENIZER_PIECE_BYTES, GetTokenizer, TokenizerPiece
from protocol.rpc import Answer, Request, Rpc
from protocol.supervision import all_of
from protocol.transport.base import PeerId

logger = logging.getLogger(__name__)

PIECE_DEADLINE = 30.0
PIECES_IN_FLIGHT = 4
ASKED_PEERS = 16
RETRY_SECONDS = 60.0


class RunTokenizer:
    """One peer's copy. Mutable state: `raw`, None until it is here; it stays so where bytes are tokens."""

    def __init__(
        self, manifest: Manifest, rpc: Rpc, view: View, state: StateDirectory | None = None, own: str = ""
    ) -> None:
        """`own` is what the volunteer names with --tokenizer."""
        self._manifest = manifest
        self._rpc = rpc
        self._view = view
        self._state = state
        self._own = own
        self.raw: bytes | None = None

    def serve(self) -> None:
        """Give it to whoever asks, once it is here."""
        serve_tokenizer(self._rpc, lambda: self.raw)

    async def get(self) -> None:
        """Have it, unless bytes are tokens: the volunteer's, the one kept, or from whoever gives it.

        Raises `TokenizerError` when the volunteer's is not the run's, and when nobody gives one. May be repeated.
        """
        if self.raw is not None or self._manifest.data.tokenizer == BYTES:
            return
        raw = await asyncio.to_thread(self._here)
        if raw is None:
            raw = await fetch_tokenizer(self._rpc, await self._peers(), self._manifest)
            logger.info("Got the run's tokenizer, %.1f MB.", len(raw) / 1e6)
        if self._state is not None:
            await asyncio.to_thread(self._state.save_tokenizer, raw)
        self.raw = raw

    async def get_in_time(self) -> None:
        """Until it is here, however often that fails: for peers that only give it to others, or may need it later."""
        while True:
            try:
                await self.get()
                return
            except NolocoError as problem:
                logger.debug("%s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    def _here(self) -> bytes | None:
        """On this machine. A kept copy that is damaged counts as none, and is fetched again."""
        if self._own:
            raw = read_tokenizer(self._own)
            load_tokenizer(raw, self._manifest)
            return raw
        kept = self._state.tokenizer() if self._state is not None else None
        return kept if kept is not None and identity_of(kept) == self._manifest.data.tokenizer else None

    async def _peers(self) -> list[PeerId]:
        """Whoever may have it: those connected, the seed peer among them, and the members known."""
        transport = self._rpc.transport
        peers = [peer for peer, _ in await transport.peers()]
        for stage in range(self._manifest.stages):
            peers += [member.peer for member in self._view.members(stage, transport.now())]
        return [peer for peer in peers if peer != transport.peer_id]


def serve_tokenizer(rpc: Rpc, raw: Callable[[], bytes | None]) -> None:
    """Answer `GetTokenizer` from what `raw` gives at that time."""

    async def on_get(request: Request[GetTokenizer]) -> Answer[TokenizerPiece]:
        contents, offset = raw(), request.message.offset
        if contents is None or offset >= len(contents):
            raise Refused("no-tokenizer")
        return Answer(
            TokenizerPiece(total=len(contents), contents=contents[offset : offset + TOKENIZER_PIECE_BYTES])
        )

    rpc.handle(GetTokenizer.answered_by(on_get))


async def fetch_tokenizer(rpc: Rpc, peers: Iterable[PeerId], manifest: Manifest) -> bytes:
    """The run's tokenizer.json from the first of `peers` that gives it. Raises `TokenizerError` if none does."""
    asked = list(dict.fromkeys(peers))[:ASKED_PEERS]
    for peer in asked:
        try:
            raw = await _fetch_from(rpc, peer)
        except NolocoError as problem:
            logger.debug("No tokenizer from %s: %s", peer[-8:], problem)
            continue
        if identity_of(raw) == manifest.data.tokenizer:
            return raw
        logger.warning("Peer %s gave a tokenizer that is not the run's.", peer[-8:])
    raise TokenizerError(
        f"Run '{manifest.name}' has a tokenizer of its own, and none of {len(asked)} peers gave it. Start again when "
        "more members can be reached, or give the run's tokenizer.json with --tokenizer FILE."
    )


async def _fetch_from(rpc: Rpc, peer: PeerId) -> bytes:
    """All pieces of one peer. Whatever it says, no more memory is taken than a tokenizer may have."""

    async def piece(offset: int) -> TokenizerPiece:
        async with slots:
            request = GetTokenizer(offset=offset)
            reply, _ = await rpc.call(peer, request, deadline=PIECE_DEADLINE)
        if len(reply.contents) != min(TOKENIZER_PIECE_BYTES, reply.total - offset):
            raise WireError("a piece of the tokenizer does not have the size that it should have")
        return reply

    slots = asyncio.Semaphore(PIECES_IN_FLIGHT)
    first = await piece(0)
    offsets = range(TOKENIZER_PIECE_BYTES, first.total, TOKENIZER_PIECE_BYTES)
    rest = await all_of(*(piece(offset) for offset in offsets))
    return b"".join([first.contents, *(reply.contents for reply in rest)])
