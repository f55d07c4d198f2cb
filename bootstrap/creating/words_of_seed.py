"""The invitation by words that a seed peer has to give: made by the founder, given once, to a newcomer that knows it.

`noloco invite --words` writes it into the run's directory, and the seed peer of that directory answers to it, without
the run's key. What became of it the seed peer writes into a file of its own: so it is over for a seed peer that is
started again, too, and neither of the two overwrites what the other one has written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bootstrap.display import write_whole
from protocol.access.peer_limits import Allowance, PeerTable
from protocol.access.word_exchange import InvitersSide
from protocol.access.words import LIFE_SECONDS, MOST_TRIES, are_words, draw_words
from protocol.errors import NolocoError, Refused
from protocol.files.keeping import FOR_ITS_OWNER
from protocol.files.places import read_own
from protocol.ground import PeerId, is_time
from protocol.messages.peers import Invited, ProveWords, TryWords, WordsTried
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.windows import window

logger = logging.getLogger(__name__)

INVITATION = "words.json"  # in the run's directory: what was made last
OVER = "words-over.json"  # beside it: which one was tried wrongly, how often, and why it is over if it is
MOST_BYTES = 4_096  # of either
MOST_PENDING = 64  # exchanges that wait for their proof
# Exchanges at once and a second, of each peer and of all: one takes 13 ms of a core
EXCHANGES = (4, 0.5), (8, 2.0)
OPEN, USED, ENDED = "", "used", "ended"
_REASONS = {
    "none": "this peer has no invitation by words to give",
    "expired": "the words have expired",
    USED: "a newcomer has used the words",
    ENDED: "the words were tried wrongly too often",
}


@dataclass(frozen=True)
class WordsInvitation:
    """An invitation by words; its `number` tells it from others, and is no secret."""

    number: str
    words: str
    token: str  # empty for an open run
    expires: float  # wall clock


def invite_by_words(directory: Path, token: str, now: float) -> str:
    """Make an invitation for the seed peer of `directory` to give, in place of the last one; return its words.

    Raises `StateError` when it cannot be written.
    """
    made = WordsInvitation(secrets.token_hex(8), draw_words(), token, now + LIFE_SECONDS)
    write_whole(directory / INVITATION, json.dumps(asdict(made)), "Check --state-dir.", mode=FOR_ITS_OWNER)
    return made.words


def words_in_force(directory: Path, now: float) -> str:
    """Return the words that the founder may have given away by now and that are not over; empty for none."""
    with suppress(Refused):
        return _in_force(directory, now).words
    return ""


def _kept(place: Path) -> dict[str, object] | None:
    """Return the contents of a file of either kind: empty if it is missing, None if damaged or another user's."""
    try:
        raw = read_own(place)
        told = json.loads(raw) if len(raw) <= MOST_BYTES else None
        if not isinstance(told, dict):
            raise ValueError
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as damage:
        logger.warning("Cannot read %s (%s): remove it, and make other words.", place, type(damage).__name__)
        return None
    return told


def _invitation_in(directory: Path) -> WordsInvitation | None:
    match _kept(directory / INVITATION):
        case {"number": str(number), "words": str(words), "token": str(token), "expires": float(expires)} if (
            are_words(words) and is_time(expires)
        ):
            return WordsInvitation(number, words, token, expires)
    return None


def _in_force(directory: Path, now: float) -> WordsInvitation:
    """Return the invitation that a newcomer may use `now`. Raises `Refused`."""
    invitation = _invitation_in(directory)
    over = _kept(directory / OVER)
    if invitation is None:
        raise _refusal("none")
    if over is None:  # it may say that these words are used
        raise Refused("failed", "this peer cannot read its disk")
    if over.get("number") == invitation.number and over.get("why") != OPEN:
        raise _refusal(str(over.get("why")))
    if not 0.0 < invitation.expires - now <= LIFE_SECONDS:  # nor after the clock was set back
        raise _refusal("expired")
    return invitation


class WordAnswers:
    """A seed peer's answers to newcomers that try words.

    Mutable state: exchanges that wait for their proof, with the invitation that each is for; the wrong proofs of each
    invitation; what newcomers may still try.
    """

    def __init__(self, me: PeerId, directory: Path, now: Callable[[], float]) -> None:
        """`directory` is the run's, `now` the wall clock."""
        self._me = me
        self._directory = directory
        self._now = now
        self._pending = PeerTable[tuple[str, InvitersSide]](MOST_PENDING)
        self._wrong = Counter[str]()
        self._allowance = Allowance(*EXCHANGES)

    @window
    def __repr__(self) -> str:
        return f"Exchanges: {len(self._pending)} wait for a proof | Wrong proofs: {self._wrong.total()}"

    def serve(self, rpc: Rpc) -> None:
        """Answer newcomers from now on."""
        rpc.handle(TryWords.answered_by(self._on_try), ProveWords.answered_by(self._on_proof))

    async def _on_try(self, request: Request[TryWords]) -> Answer[WordsTried]:
        peer = request.peer
        if not self._allowance.take(peer, 1, asyncio.get_running_loop().time()):
            raise Refused("too-often", "too many try words here")
        invitation = self._in_force()
        side = InvitersSide(invitation.words, peer, self._me, request.message.message)
        self._pending[peer] = invitation.number, side
        return Answer(WordsTried(message=side.message))

    async def _on_proof(self, request: Request[ProveWords]) -> Answer[Invited]:
        peer = request.peer
        number, side = self._pending.pop(peer, ("", None))
        if side is None or number != (invitation := self._in_force()).number:
            raise Refused("words-none", "no exchange of these words has begun")
        if side.proves(request.message.proof):
            self._write(invitation, USED)
            logger.info("A newcomer (…%s) has used the words of the invitation.", peer[-8:])
            return Answer(Invited(sealed=side.sealed(invitation.token)))
        self._wrong[number] += 1
        self._write(invitation, ENDED if self._wrong[number] >= MOST_TRIES else OPEN)
        if self._wrong[number] >= MOST_TRIES:
            logger.warning("The words were tried wrongly %d times and have ended. Make others.", MOST_TRIES)
        else:
            logger.warning(
                "A newcomer (…%s) tried wrong words (%d of %d).", peer[-8:], self._wrong[number], MOST_TRIES
            )
        raise Refused("words-wrong", "these are not the words")

    def _in_force(self) -> WordsInvitation:
        """Return the invitation that may be used now. Raises `Refused`."""
        invitation = _in_force(self._directory, self._now())
        self._wrong[invitation.number] = max(self._wrong[invitation.number], self._wrong_before(invitation))
        if self._wrong[invitation.number] >= MOST_TRIES:  # the file could not be written
            raise _refusal(ENDED)
        return invitation

    def _wrong_before(self, invitation: WordsInvitation) -> int:
        """Return how often the words were tried wrongly before this seed peer was started again."""
        match _kept(self._directory / OVER):
            case {"number": invitation.number, "wrong": int(wrong)}:
                return wrong
        return 0

    def _write(self, invitation: WordsInvitation, why: str) -> None:
        """Write down what became of it. Raises `Refused` when that is impossible: then it is not given, either."""
        told = json.dumps({"number": invitation.number, "why": why, "wrong": self._wrong[invitation.number]})
        try:
            write_whole(self._directory / OVER, told, "Check --state-dir.", mode=FOR_ITS_OWNER)
        except NolocoError as error:
            logger.warning("%s", error)
            raise Refused("failed", "this peer cannot write to its disk") from error


def _refusal(why: str) -> Refused:
    known = why if why in _REASONS else "none"
    return Refused(f"words-{known}", _REASONS[known])
