"""The way into a run by an invitation's words: from the seed peer's host to its address and a token."""

from __future__ import annotations

from collections.abc import Sequence

from node.membership.joining import passing_by
from protocol.access.tokens import Token
from protocol.access.word_exchange import NewcomersSide
from protocol.access.words import read_words
from protocol.errors import JoinError, NolocoError, RecordError, Refused, TokenError, UserError, later
from protocol.ground import PeerId
from protocol.messages.peers import ProveWords, TryWords
from protocol.records.addresses import check_address, peer_id_in, seed_place
from protocol.rpc.rpc import Rpc
from protocol.transport.base import Transport
from protocol.transport.peer_at import address_at

DEADLINE = 10.0  # of each of the two requests
_ASK = "Ask the run's founder for new ones: noloco invite --words"


async def accept_invitation(words: str, addresses: Sequence[str], at: str) -> tuple[str, str]:
    """Return the address of the seed peer and a token for its run; the token is empty for an open run.

    The seed peer is the one `at` HOST[:PORT], or at one of the `addresses`. Takes `DIAL_DEADLINE` and three times
    `DEADLINE` at most. Raises `TokenError` where the words open nothing, `JoinError` where nobody answers. Wrong
    words count as a try there. Any other failure may be repeated, unless the seed peer's last answer was lost: the
    words are used then.
    """
    words, known = read_words(words), [check_address(address) for address in addresses]
    if not known:
        known = [await address_at(*seed_place(at))]
    async with passing_by(known, "Check that the seed peer runs and that its TCP port is open.") as here:
        inviting = here.reached[0]
        token = await exchange(here.rpc, here.transport, inviting, words)
        return next(address for address in known if peer_id_in(address) == inviting), token


async def exchange(rpc: Rpc, transport: Transport, inviting: PeerId, words: str) -> str:
    """Prove to one peer that this one knows the words, once, and return the token that it gives.

    Raises as `accept_invitation`.
    """
    side = NewcomersSide(words, transport.peer_id, inviting)
    try:
        tried, _ = await rpc.call(inviting, TryWords(message=side.message), deadline=DEADLINE)
        proof = side.proof(tried.message)
        invited, _ = await rpc.call(inviting, ProveWords(proof=proof), deadline=DEADLINE)
        token = side.open(invited.sealed)
        return Token.from_text(token).to_text() if token else ""
    except Refused as refusal:
        raise _told(refusal) from None
    except RecordError:
        raise TokenError(
            f"The peer there does not know the words, whatever it says: it is not the one that invited you. {_ASK}"
        ) from None
    except UserError:
        raise
    except NolocoError as error:
        raise later(
            JoinError(f"The seed peer did not answer in time ({error}). Try again; if it stays: {_ASK}")
        ) from None


def _told(refusal: Refused) -> UserError:
    """Return the error that stands for a refusal of the seed peer."""
    match refusal.code:
        case "words-none":
            return TokenError(f"The peer there has no invitation by words to give. {_ASK}")
        case "words-expired":
            return TokenError(f"The words have expired: they last ten minutes. {_ASK}")
        case "words-used":
            return TokenError(f"The words have been used, and let in one newcomer alone. {_ASK}")
        case "words-ended":
            return TokenError(f"The words were tried wrongly three times and have ended. {_ASK}")
        case "words-wrong":
            return TokenError(
                "These are not the words of the invitation. Compare them with the founder's; after three wrong tries "
                "they end."
            )
        case "too-often":
            return later(JoinError("Too many try words at that peer at present. Try again in a minute."))
        case "unknown-request":
            return JoinError(
                "The peer there gives no invitation by words: it is no seed peer, or of an earlier version. Name the "
                "seed peer with --at, or ask for the whole line: noloco invite"
            )
        case _:
            return later(JoinError(f"The seed peer refuses that now ({refusal}). Try again in a minute."))
