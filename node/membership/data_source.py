"""Opens what a node trains on, its data and the run's tokenizer, and keeps them while it serves other stages."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from node.config import NodeConfig
from node.data.batches import TrainingData
from node.data.opening import DataPlan, open_data
from node.data.prefetch import Feed
from node.data.tokenizer import identity_of, load_tokenizer
from node.data.tokenizer_files import read_tokenizer
from node.machine.processes import in_background
from node.membership.tokenizer_peers import fetch_tokenizer, nobody_gave, serve_tokenizer
from node.membership.tokenizer_pieces import fetch_pieces, find_hashes
from node.membership.view import View
from node.storage.position import Position
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from protocol.errors import NolocoError, RecordError
from protocol.ground import PeerId
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import BYTES, Manifest
from protocol.run.piece_hashes import PieceHashes
from protocol.run.signed_manifest import SignedManifest
from protocol.windows import amount, window

logger = logging.getLogger(__name__)

ReadData = Callable[[Manifest, Sequence[str]], TrainingData]

RETRY_SECONDS = 60.0


class DataSupply:
    """Opens the data and tokenizer that a node trains on and keeps them while it serves other stages."""

    def __init__(
        self,
        config: NodeConfig,
        manifest: Manifest,
        state: StateDirectory | None,
        events: Events,
        read: ReadData | None = None,
    ) -> None:
        self._manifest = manifest
        self._events = events
        self._read = read
        cache = config.data_cache or (state.path if state is not None else Path()) / "documents"
        self._plan = DataPlan(config.data, config.text_field, cache, config.cache_size)
        self._data: TrainingData | None = None
        self._feed: Feed | None = None
        self._saved: Position | None = None

    @window
    def __repr__(self) -> str:
        data = "closed" if self._data is None else repr(self._data)
        return f"Data: {data} | Feed: {'none' if self._feed is None else repr(self._feed)}"

    def require(self) -> None:
        """Check that there is text. Raises `DataError` when the run leaves it to its volunteers and none is named."""
        if self._read is None:
            self._plan.require(self._manifest)

    async def open(self, tokenizer: bytes | None) -> None:
        """Read the data, the first time, in a thread. Raises `UserError` with what to do."""
        if self._data is None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            self._data = await in_background("data", self._open, tokenizer)
            self._events.emit("data-open", seconds=round(loop.time() - began, 3))

    def _open(self, tokenizer: bytes | None) -> TrainingData:
        if self._read is not None:
            return self._read(self._manifest, self._plan.entries)
        data = open_data(self._manifest, self._plan, tokenizer)
        data.require(self._manifest.data.sequence_tokens)
        return data

    def feed(self, run_id: str, peer_id: str) -> Feed:
        """The line of microbatches, from where this node was when it trained last. Call `open` before."""
        assert self._data is not None
        if self._feed is None:
            # Data that are given belong to a swarm in this process, whose clock is the loop's
            clock = time.perf_counter if self._read is None else asyncio.get_running_loop().time
            self._feed = Feed(self._data, run_id, peer_id, self._manifest, self._saved, clock)
            if self._saved is not None and not self._feed.goes_on_from(self._saved):
                self._events.say(
                    "The data are not those of the checkpoint; beginning with their first epoch.",
                    "data-changed",
                )
        return self._feed

    def return_to(self, position: Position | None) -> None:
        """Begin at the position that the checkpoint had; call it before the first feed."""
        self._saved = position

    def position(self, step: int | None = None) -> Position | None:
        """The position to save with the weights after inner step `step`; without one, with those of another stage."""
        return self._saved if self._feed is None else self._feed.position(step)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()


class RunTokenizer:
    """One peer's copy of the run's tokenizer: `raw`, None until it is here, and for good where bytes are tokens.

    Mutable state: that, and `hashes`, the sealed list of its pieces' hashes; empty where nobody gave one.
    """

    def __init__(
        self,
        signed: SignedManifest,
        rpc: Rpc,
        view: View,
        state: StateDirectory | None = None,
        own: str = "",
    ) -> None:
        """`own` is what the volunteer names with --tokenizer."""
        self._signed = signed
        self._manifest = signed.manifest
        self._rpc = rpc
        self._view = view
        self._state = state
        self._own = own
        self._rng = random.Random()  # whom to ask first is not for others to foresee
        self.raw: bytes | None = None
        self.hashes = b""

    @window
    def __repr__(self) -> str:
        if self._manifest.data.tokenizer == BYTES:
            return "bytes"
        hashes = f" | Hashes: {'signed' if self.hashes else 'none'}"
        return ("not here yet" if self.raw is None else amount(len(self.raw))) + hashes

    def serve(self) -> None:
        serve_tokenizer(self._rpc, lambda: self.raw, lambda: self.hashes)

    async def get(self) -> None:
        """Get the tokenizer, unless bytes are tokens: the volunteer's, the one kept, or from peers that give it.

        Raises `TokenizerError` when the volunteer's is not the run's, and when nobody gives one. May be repeated.
        """
        if self.raw is not None or self._manifest.data.tokenizer == BYTES:
            return
        raw = await asyncio.to_thread(self._here)
        if raw is None:
            raw = await self._from_peers()
            logger.info("Got the run's tokenizer, %s kB.", f"{len(raw) / 1e3:,.0f}")
        if self._state is not None:
            await asyncio.to_thread(self._state.save_tokenizer, raw, self.hashes)
        self.raw = raw

    async def _from_peers(self) -> bytes:
        """Fetch the file by its pieces where a peer has their hashes, else whole. Raises `TokenizerError`."""
        peers = await self._peers()
        sealed = self.hashes or await find_hashes(self._rpc, peers, self._signed, self._rng)
        if not sealed:
            return await fetch_tokenizer(self._rpc, peers, self._manifest, self._rng)
        hashes = PieceHashes.read(sealed, self._manifest.data.tokenizer, self._signed.public_key)
        raw = await fetch_pieces(self._rpc, peers, hashes, self._rng)
        if raw is None:
            raise nobody_gave(self._manifest, len(set(peers)))
        if identity_of(raw) != self._manifest.data.tokenizer:
            logger.warning("The run's owner signed the pieces of another tokenizer; it is fetched whole.")
            return await fetch_tokenizer(self._rpc, peers, self._manifest, self._rng)
        self.hashes = sealed
        return raw

    async def get_in_time(self) -> None:
        """Retry `get` until it succeeds: for peers that only give the tokenizer to others, or may need it later."""
        while True:
            try:
                await self.get()
                return
            except NolocoError as problem:
                logger.debug("%s", problem)
            await asyncio.sleep(RETRY_SECONDS)

    def _here(self) -> bytes | None:
        """The copy on this machine. A kept copy that is damaged counts as none, and is fetched again."""
        self.hashes = self._kept_hashes()
        if self._own:
            raw = read_tokenizer(self._own)
            load_tokenizer(raw, self._manifest)
            return raw
        kept = self._state.tokenizer() if self._state is not None else None
        if kept is None or identity_of(kept) == self._manifest.data.tokenizer:
            return kept
        logger.warning("The tokenizer.json that was kept is damaged; another member gives it again.")
        return None

    def _kept_hashes(self) -> bytes:
        sealed = self._state.tokenizer_hashes() if self._state is not None else b""
        try:
            if sealed:
                PieceHashes.read(sealed, self._manifest.data.tokenizer, self._signed.public_key)
        except RecordError as damage:
            logger.warning("The hashes of the tokenizer that were kept cannot be used (%s).", damage)
            return b""
        return sealed

    async def _peers(self) -> list[PeerId]:
        """The peers that may have it: those connected, the seed peer among them, and the members known."""
        transport = self._rpc.transport
        peers = [peer for peer, _ in await transport.peers()]
        for stage in range(self._manifest.stages):
            peers += [member.peer for member in self._view.members(stage, transport.now())]
        return [peer for peer in peers if peer != transport.peer_id]
