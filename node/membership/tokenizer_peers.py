"""Gives the run's tokenizer.json to other peers, and gets it from them where nobody has the hashes of its pieces.

That is so in runs that were founded before there were any (see `node.membership.tokenizer_pieces`). A liar is then
known only by the whole file, which the signed manifest names by its hash. So all peers are asked for the first piece,
and with it for the size, and the file that most of them offer is fetched first.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from node.data.tokenizer import identity_of
from protocol.errors import NolocoError, Refused, TokenizerError, WireError
from protocol.ground import PeerId
from protocol.messages.state import GetTokenizer, GetTokenizerHashes, TokenizerHashes, TokenizerPiece
from protocol.rpc.channel import slowest_seconds
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.run.manifest import Manifest
from protocol.run.piece_hashes import MAX_TOKENIZER_BYTES, TOKENIZER_PIECE_BYTES
from protocol.supervision import Supervisor, all_of, cancelled

logger = logging.getLogger(__name__)

PIECE_DEADLINE = 30.0
PIECES_IN_FLIGHT = 4
ASKED_AT_ONCE = 16  # peers, for the first piece
SECOND_AFTER = 30.0  # seconds without the whole of a file, after which another one is fetched beside it
FETCHED_AT_ONCE = 4  # files that differ: a liar is quick, and known by its file, or takes nothing of the line
MOST_BYTES = 8 * MAX_TOKENIZER_BYTES  # of files that are not the run's; a quarter of it before all were asked


def serve_tokenizer(
    rpc: Rpc, raw: Callable[[], bytes | None], hashes: Callable[[], bytes] = lambda: b""
) -> None:
    """Answer `GetTokenizer` from what `raw` gives at that time, and `GetTokenizerHashes` from the sealed `hashes`."""

    async def on_get(request: Request[GetTokenizer]) -> Answer[TokenizerPiece]:
        contents, offset = raw(), request.message.offset
        if contents is None or offset >= len(contents):
            raise Refused("no-tokenizer")
        return Answer(
            TokenizerPiece(total=len(contents), contents=contents[offset : offset + TOKENIZER_PIECE_BYTES])
        )

    async def on_hashes(request: Request[GetTokenizerHashes]) -> Answer[TokenizerHashes]:
        if not (sealed := hashes()):
            raise Refused("no-hashes")
        return Answer(TokenizerHashes(sealed=sealed))

    rpc.handle(GetTokenizer.answered_by(on_get), GetTokenizerHashes.answered_by(on_hashes))


async def fetch_tokenizer(rpc: Rpc, peers: Iterable[PeerId], manifest: Manifest, rng: random.Random) -> bytes:
    """The whole tokenizer.json from one of `peers`, drawn at random. Raises `TokenizerError` if none gives it.

    All are asked before it does, for what each has; up to `MOST_BYTES` that are not the run's are fetched. A peer
    that gives another file is struck.
    """
    asked = list(dict.fromkeys(peers))
    rng.shuffle(asked)
    offers = _Offers()
    for start in range(0, len(asked), ASKED_AT_ONCE):
        some = asked[start : start + ASKED_AT_ONCE]
        for peer, offer in zip(some, await all_of(*(_offer_of(rpc, peer) for peer in some)), strict=True):
            if offer is not None:
                offers.peers.setdefault(offer, []).append(peer)
        is_last = start + ASKED_AT_ONCE >= len(asked)
        if (raw := await _fetched(rpc, offers, is_last, manifest.data.tokenizer)) is not None:
            return raw
    raise nobody_gave(manifest, len(asked))


def nobody_gave(manifest: Manifest, asked: int) -> TokenizerError:
    """Return the error for a tokenizer that the run has and no peer of those `asked` has sent."""
    return TokenizerError(
        f"Run '{manifest.name}' has a tokenizer of its own, and none of {asked} peers gave it. Start again when "
        "more members can be reached, or give the run's tokenizer.json with --tokenizer FILE."
    )


async def _fetched(rpc: Rpc, offers: _Offers, is_last: bool, wanted: str) -> bytes | None:
    """Fetch the offered files until one has the identity `wanted`; None when `_Offers.best` has no more to fetch.

    A slow peer holds nobody up: after `SECOND_AFTER` another file is fetched beside its own, and once it is slower
    than the slowest link allowed, the same file from another peer.
    """
    tasks, under_way = Supervisor(), dict[asyncio.Task[bytes | None], _Fetching]()
    clock = asyncio.get_running_loop().time
    try:
        while True:
            late = [task for task, one in under_way.items() if clock() >= one.due]
            slow = {under_way[task].offer for task in late}
            offer = offers.best(is_last, {one.offer for one in under_way.values()} - slow)
            if offer is not None and late and len(under_way) >= FETCHED_AT_ONCE:
                late[0].cancel()
            elif offer is not None and len(under_way) < FETCHED_AT_ONCE:
                offers.wasted += offer.total
                fetching = _Fetching(offer, offers.peers[offer].pop(), clock() + slowest_seconds(offer.total))
                under_way[tasks.start(_fetch_from(rpc, fetching.peer, offer.total))] = fetching
            if not under_way:
                return None
            done, _ = await asyncio.wait(under_way, timeout=SECOND_AFTER, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                fetched, raw = under_way.pop(task), None if task.cancelled() else task.result()
                if raw is not None and identity_of(raw) == wanted:
                    return raw
                if raw is not None:
                    offers.refuted.add(fetched.offer)
                    rpc.strike(fetched.peer)
                    logger.warning("Peer %s gave a tokenizer that is not the run's.", fetched.peer[-8:])
    finally:
        await cancelled(list(under_way))


class _Offer(NamedTuple):
    """A file as its first piece shows it."""

    total: int  # bytes
    digest: bytes  # of the first piece


class _Fetching(NamedTuple):
    """A file on its way from a peer; after `due`, on the loop's clock, it is too slow."""

    offer: _Offer
    peer: PeerId
    due: float


@dataclass
class _Offers:
    """What peers offer, and which file to fetch next. Pure.

    Mutable state: the peers left by what they offer, the offers that were not the run's, and the bytes of those.
    """

    peers: dict[_Offer, list[PeerId]] = field(default_factory=dict)
    refuted: set[_Offer] = field(default_factory=set)
    wasted: int = 0

    def best(self, is_last: bool, without: Collection[_Offer] = ()) -> _Offer | None:
        """Return the next file to fetch, leaving out `without`; None if none may be fetched yet.

        The file that most peers offer comes first, of several the smallest. Until `is_last`, when there are no more
        peers to ask for offers, a quarter of `MOST_BYTES` may be spent, and not on refuted files. A refuted file may
        still be good: its peer may have shown another peer's first piece and then given something else.
        """
        most = MOST_BYTES if is_last else MOST_BYTES // 4
        left = [
            offer
            for offer, peers in self.peers.items()
            if peers
            and offer not in without
            and self.wasted + offer.total <= most
            and (is_last or offer not in self.refuted)
        ]
        return min(left, key=lambda one: (one in self.refuted, -len(self.peers[one]), one), default=None)


async def _offer_of(rpc: Rpc, peer: PeerId) -> _Offer | None:
    try:
        first = await _piece(rpc, peer, 0, None)
    except NolocoError as problem:
        logger.debug("No tokenizer from %s: %s", peer[-8:], problem)
        return None
    return _Offer(first.total, hashlib.sha256(first.contents).digest())


async def _piece(rpc: Rpc, peer: PeerId, offset: int, total: int | None) -> TokenizerPiece:
    """Ask for a piece of a file of `total` bytes, None for whatever it has. Raises `WireError` for another size."""
    reply, _ = await rpc.call(peer, GetTokenizer(offset=offset), deadline=PIECE_DEADLINE)
    is_of_it = total is None or reply.total == total
    if not is_of_it or len(reply.contents) != min(TOKENIZER_PIECE_BYTES, reply.total - offset):
        rpc.strike(peer)
        raise WireError("a piece of the tokenizer does not have the size that it should have")
    return reply


async def _fetch_from(rpc: Rpc, peer: PeerId, total: int) -> bytes | None:
    """Fetch a whole file from the peer; None if not all of it comes."""
    slots = asyncio.Semaphore(PIECES_IN_FLIGHT)

    async def piece(offset: int) -> bytes:
        async with slots:
            return (await _piece(rpc, peer, offset, total)).contents

    try:
        pieces = await all_of(*(piece(offset) for offset in range(0, total, TOKENIZER_PIECE_BYTES)))
    except NolocoError as problem:
        logger.debug("No tokenizer from %s: %s", peer[-8:], problem)
        return None
    return b"".join(pieces)
