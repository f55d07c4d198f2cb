"""Gets the run's tokenizer.json from several peers at once, by the hashes of its pieces that the run's owner signed.

A wrong piece is known when it arrives, so a liar costs one piece and is asked for no other. Each peer has one piece
to give at a time, unless it is the only one left. A peer that takes long keeps nobody waiting: another one is asked
for the same piece, and the first right answer counts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from protocol.access.peer_limits import doubled
from protocol.errors import NolocoError, WireError
from protocol.ground import PeerId
from protocol.messages.state import GetTokenizer, GetTokenizerHashes, TokenizerHashes, TokenizerPiece
from protocol.rpc.rpc import Rpc
from protocol.run.piece_hashes import TOKENIZER_PIECE_BYTES, PieceHashes
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor, all_of, cancelled, until_event

logger = logging.getLogger(__name__)

HASHES_DEADLINE = 5.0
HASHES_SECONDS = 15.0  # for the question to all peers
ASKED_AT_ONCE = 16  # peers, for the hashes
PIECE_DEADLINE = 30.0
IN_FLIGHT = 4  # pieces, without those that are late
MOST_LATE = 4  # pieces; the one awaited longest makes room
LATE_AFTER = (
    5.0  # seconds, or `LATE_TIMES` the usual answer: twice as long with each late one until an answer comes
)
LATE_TIMES = 3.0
REMEMBERED = 9  # answers, for what is usual
TRIES = 2  # of a peer that does not answer


async def find_hashes(rpc: Rpc, peers: Iterable[PeerId], signed: SignedManifest, rng: random.Random) -> bytes:
    """Ask the peers for the signed hashes; return the first good list, sealed, or b"" when nobody gives one.

    Takes `HASHES_SECONDS` at most. A list that the owner did not sign is a breach of protocol. May be repeated.
    """
    left = list(dict.fromkeys(peers))
    rng.shuffle(left)
    found: list[bytes] = []
    is_found = asyncio.Event()

    def checked(reply: TokenizerHashes, _: object) -> bytes:
        PieceHashes.read(reply.sealed, signed.manifest.data.tokenizer, signed.public_key)
        return reply.sealed

    async def ask() -> None:
        while left:
            peer = left.pop()
            try:
                found.append(
                    await rpc.call_and_read(
                        peer, GetTokenizerHashes(), read=checked, deadline=HASHES_DEADLINE
                    )
                )
                is_found.set()
            except NolocoError as problem:
                logger.debug("No hashes of the tokenizer from %s: %s", peer[-8:], problem)

    try:
        async with asyncio.timeout(HASHES_SECONDS):
            await until_event(all_of(*(ask() for _ in range(ASKED_AT_ONCE))), is_found)
    except TimeoutError:
        pass
    return found[0] if found else b""


async def fetch_pieces(
    rpc: Rpc, peers: Iterable[PeerId], hashes: PieceHashes, rng: random.Random
) -> bytes | None:
    """Fetch the file whose pieces have these hashes; None when the peers do not give all of it.

    A peer that gives a wrong piece is struck, logged once, and asked for nothing more.
    """
    donors = list(dict.fromkeys(peers))
    rng.shuffle(donors)
    order = Order(len(hashes.each), donors)
    tasks, under_way = Supervisor(), dict[asyncio.Task[bytes], Asked]()
    clock = asyncio.get_running_loop().time
    try:
        while order.missing:
            for asked in order.next(clock()):
                under_way[tasks.start(_piece(rpc, asked, hashes))] = asked
            for task, asked in under_way.items():
                if asked in order.given_up:
                    task.cancel()
            if not under_way:
                return None
            await asyncio.wait(under_way, timeout=order.pause(clock()), return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in under_way if task.done()]:
                _note(order, under_way.pop(task), task, clock())
    finally:
        await cancelled(list(under_way))
    return b"".join(order.here[index] for index in range(len(hashes.each)))


async def _piece(rpc: Rpc, asked: Asked, hashes: PieceHashes) -> bytes:
    def checked(reply: TokenizerPiece, _: object) -> bytes:
        return hashes.require(asked.index, reply.contents)

    request = GetTokenizer(offset=asked.index * TOKENIZER_PIECE_BYTES)
    return await rpc.call_and_read(asked.peer, request, read=checked, deadline=PIECE_DEADLINE)


def _note(order: Order, asked: Asked, task: asyncio.Task[bytes], now: float) -> None:
    try:
        order.came(asked, task.result(), now)
    except WireError:
        order.lied(asked)
        logger.warning("Peer %s gave a piece of a tokenizer that is not the run's.", asked.peer[-8:])
    except (NolocoError, asyncio.CancelledError) as problem:
        order.failed(asked)
        logger.debug("No piece of the tokenizer from %s: %s", asked.peer[-8:], problem)


@dataclass(frozen=True)
class Asked:
    """A question for a piece, on its way since `since` by the loop's clock."""

    peer: PeerId
    index: int
    since: float


@dataclass
class Order:
    """Decides which piece is asked of which peer. Pure; times are by the loop's clock.

    Mutable state: the donors left, those that were right before the others; the pieces here; the questions on their
    way, the late ones among them and those to give up; each donor's failures; how long the last answers took, and
    how often a question became late since.
    """

    pieces: int
    donors: list[PeerId]
    here: dict[int, bytes] = field(default_factory=dict)
    on_way: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)
    given_up: set[Asked] = field(default_factory=set)
    failures: Counter[PeerId] = field(default_factory=Counter)
    took: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    waits: int = 0

    @property
    def missing(self) -> int:
        return self.pieces - len(self.here)

    @property
    def patience(self) -> float:
        """Seconds until a question is late."""
        usual = LATE_TIMES * median(self.took) if self.took else 0.0
        return doubled(max(LATE_AFTER, usual), self.waits, PIECE_DEADLINE)

    def pause(self, now: float) -> float:
        """Seconds until the next question is late."""
        due = [asked.since + self.patience - now for asked in self.on_way if asked not in self.late]
        return max(0.0, min(due, default=PIECE_DEADLINE))

    def next(self, now: float) -> Sequence[Asked]:
        """Return the questions to ask now; from then on they are on their way."""
        overdue = [
            asked for asked in self.on_way if asked not in self.late and now >= asked.since + self.patience
        ]
        for asked in overdue:
            self.late.append(asked)
            self._put_back(asked.peer)
        if overdue:
            self.waits += 1
        self.given_up.update(self.late[: max(0, len(self.late) - MOST_LATE)])
        asked_now: list[Asked] = []
        while len(self.on_way) - len(self.late) < IN_FLIGHT and (one := self._one(now)) is not None:
            self.on_way.append(one)
            asked_now.append(one)
        return asked_now

    def _one(self, now: float) -> Asked | None:
        """The first piece that nobody is about to give, and the first donor that is free and was not asked for it."""
        waited_for = {asked.index for asked in self.on_way if asked not in self.late}
        busy = Counter(asked.peer for asked in self.on_way)
        most = IN_FLIGHT if len(self.donors) == 1 else 1
        free = [peer for peer in self.donors if busy[peer] < most]
        for index in range(self.pieces if free else 0):
            if index in self.here or index in waited_for:
                continue
            asked = {other.peer for other in self.on_way if other.index == index}
            for peer in free:
                if peer not in asked:
                    return Asked(peer, index, now)
        return None

    def came(self, asked: Asked, contents: bytes, now: float) -> None:
        """Take a right piece. Its donor is asked before all that were not right yet, unless it was late."""
        self.here[asked.index] = contents
        self.took.append(now - asked.since)
        self.waits = 0
        if asked not in self.late and asked.peer in self.donors:
            self.donors.remove(asked.peer)
            self.donors.insert(0, asked.peer)
        self._end(asked)

    def failed(self, asked: Asked) -> None:
        """Note that no answer came; after `TRIES` the peer is asked for nothing more."""
        self._end(asked)
        self.failures[asked.peer] += 1
        if self.failures[asked.peer] >= TRIES:
            self.donors = [peer for peer in self.donors if peer != asked.peer]
        else:
            self._put_back(asked.peer)

    def lied(self, asked: Asked) -> None:
        """Note a wrong piece: its donor is asked for nothing more."""
        self._end(asked)
        self.donors = [peer for peer in self.donors if peer != asked.peer]
        self.given_up.update(other for other in self.on_way if other.peer == asked.peer)

    def _put_back(self, peer: PeerId) -> None:
        if peer in self.donors:
            self.donors.remove(peer)
            self.donors.append(peer)

    def _end(self, asked: Asked) -> None:
        self.on_way.remove(asked)
        if asked in self.late:
            self.late.remove(asked)
        self.given_up.discard(asked)
