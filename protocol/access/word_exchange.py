"""The exchange by which a newcomer proves that it knows an invitation's words, and gets the token sealed.

SPAKE2 (Abdalla and Pointcheval, 2005) makes one key at both ends if both know the words, and two unrelated keys
otherwise; python-spake2 is magic-wormhole's, on Ed25519, and older than RFC 9382, whose constants are others.
Neither message shows anything of the words: a guess can be checked only against the other side, once an exchange.
The names of both sides are their peer ids, so that an exchange which a third peer passes on fails like wrong
words. The newcomer proves its key first: what the inviting peer has sent until then is of no use for checking a
guess, and each wrong proof is counted there.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

from protocol.access.words import MESSAGE_BYTES
from protocol.errors import RecordError
from protocol.ground import PeerId

_NONCE = bytes(12)  # each key seals one message alone
_PASSWORD = "noloco words 1:"  # so that the words mean this one thing
_PROOF, _SEAL = b"noloco words: the newcomer's proof", b"noloco words: the seal"


class NewcomersSide:
    """The newcomer's side of one exchange. Mutable state: the exchange, and its key once the other side answers."""

    def __init__(self, words: str, newcomer: PeerId, inviting: PeerId) -> None:
        self._exchange = SPAKE2_A(_password(words), newcomer.encode(), inviting.encode())
        self._key = b""
        self.message: bytes = self._exchange.start()  # the first to send

    def proof(self, message: bytes) -> bytes:
        """Return the proof for the other side's `message`. Raises `RecordError` for what is none."""
        self._key = _finished(self._exchange, message)
        return _derived(self._key, _PROOF)

    def open(self, sealed: bytes) -> str:
        """Return the token that the other side sealed. Raises `RecordError` where it did not know the words."""
        try:
            plain = ChaCha20Poly1305(_derived(self._key, _SEAL)).decrypt(_NONCE, sealed, None)
            return plain.decode("ascii")
        except (InvalidTag, ValueError):
            raise RecordError("sealed by a peer that does not know the words") from None


class InvitersSide:
    """The answer to one try. It has one proof checked, and never again."""

    def __init__(self, words: str, newcomer: PeerId, inviting: PeerId, message: bytes) -> None:
        """Answer the newcomer's `message`. Raises `RecordError` for what is none."""
        exchange = SPAKE2_B(_password(words), newcomer.encode(), inviting.encode())
        self.message: bytes = exchange.start()  # to be sent back
        self._key = _finished(exchange, message)

    def proves(self, proof: bytes) -> bool:
        """Return whether the newcomer knows the words; in constant time."""
        return hmac.compare_digest(proof, _derived(self._key, _PROOF))

    def sealed(self, token: str) -> bytes:
        """Seal the token for a newcomer that has proved to know the words; once."""
        return ChaCha20Poly1305(_derived(self._key, _SEAL)).encrypt(_NONCE, token.encode("ascii"), None)


def _password(words: str) -> bytes:
    return (_PASSWORD + words).encode("ascii")


def _finished(exchange: SPAKE2_A | SPAKE2_B, message: bytes) -> bytes:
    if len(message) != MESSAGE_BYTES:
        raise RecordError(f"a message of {len(message)} bytes")
    try:
        key: bytes = exchange.finish(message)
    except (SPAKEError, NotOnCurve, ValueError) as error:
        raise RecordError("not a message of this exchange") from error
    return key


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, purpose, hashlib.sha256)
