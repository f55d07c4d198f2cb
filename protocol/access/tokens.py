"""Invitations to a private run: a token is a key that the run's owner signed, and signs for the peer that uses it.

What a token's holder shows is a credential: the invitation, and the token's signature over the holder's own peer id.
It gives nobody else anything, so it may stand in records that all members read. Tokens are made with the owner's key,
or with a delegate's, which the owner signed.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, replace

import msgpack

from protocol.errors import RecordError, TokenError
from protocol.files.installation import upgrade_line
from protocol.ground import is_time
from protocol.records.identity import Identity, public_key_of, verify
from protocol.windows import window

MAX_CREDENTIAL_BYTES = 768
MAX_TOKEN_CHARACTERS = 1_024
MAX_USES = 4_096
SERIAL_BYTES = 12
_PREFIX = "noloco-"
_DELEGATE = b"noloco delegate 1:"  # so that a signature means one thing alone
_INVITATION = b"noloco invitation 1:"
_USE = b"noloco use of a token 1:"


@dataclass(frozen=True)
class Delegation:
    """The owner's word that another key may sign invitations until then."""

    key: bytes
    expires: float  # wall clock
    signature: bytes  # the owner's

    @classmethod
    def sign(cls, owner: Identity, run_id: str, key: bytes, expires: float) -> Delegation:
        return cls(key, expires, owner.sign(_DELEGATE + msgpack.packb([run_id, key, expires])))

    def holds(self, run_id: str, owner: bytes) -> bool:
        return verify(owner, _DELEGATE + msgpack.packb([run_id, self.key, self.expires]), self.signature)


@dataclass(frozen=True)
class Invitation:
    """The invitation that a token's issuer signs."""

    serial: bytes
    key: bytes  # the token's own
    uses: int  # peers that may come with it
    expires: float  # wall clock
    signature: bytes = b""
    delegation: Delegation | None = None  # of whose key it is signed with; None: the owner's

    def signed(self, run_id: str) -> bytes:
        packed: bytes = msgpack.packb([run_id, self.serial, self.key, self.uses, self.expires])
        return _INVITATION + packed

    def holds(self, run_id: str, owner: bytes) -> bool:
        issuer = owner if self.delegation is None else self.delegation.key
        named = self.delegation is None or self.delegation.holds(run_id, owner)
        return named and verify(issuer, self.signed(run_id), self.signature)

    @property
    def ends(self) -> float:
        """The time at which the invitation or the right to give it is over, on the wall clock."""
        return min(self.expires, self.delegation.expires if self.delegation else self.expires)

    def parts(self) -> list[object]:
        delegation = self.delegation
        given = [delegation.key, delegation.expires, delegation.signature] if delegation else None
        return [self.serial, self.key, self.uses, self.expires, self.signature, given]


@dataclass(frozen=True)
class Credential:
    """A credential that a peer shows: an invitation, and that the token's holder gave it to this peer."""

    invitation: Invitation
    use: bytes  # the token's signature over the peer id

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb([*self.invitation.parts(), self.use])
        return packed

    @classmethod
    def read(cls, raw: bytes, run_id: str, owner: bytes, peer: str) -> Credential:
        """Read one whose signatures all hold; whether it is over, used too often or revoked is for others to ask.

        `owner` is the run's public key. Raises `RecordError`, and nothing else, for any other bytes.
        """
        if len(raw) > MAX_CREDENTIAL_BYTES:
            raise RecordError(f"the credential has {len(raw)} bytes")
        match _unpacked(raw):
            case [*parts, bytes(use)]:
                credential = cls(_invitation_of(parts), use)
            case _:
                raise RecordError("not a credential")
        invitation = credential.invitation
        if not invitation.holds(run_id, owner):
            raise RecordError("an invitation that this run's owner did not sign")
        if not verify(invitation.key, _use_of(run_id, peer), use):
            raise RecordError("an invitation given to another peer")
        return credential


class Token:
    """An invitation with its private key: whoever has it may let in as many peers as it says."""

    def __init__(self, run_id: str, invitation: Invitation, key: Identity, seed: bytes) -> None:
        self.run_id = run_id
        self.invitation = invitation
        self._key = key
        self._seed = seed

    @window
    def __repr__(self) -> str:
        by = "the owner" if self.invitation.delegation is None else "a delegate"
        return f"Run: {self.run_id} | Uses: {self.invitation.uses} | Signed by: {by}"

    @classmethod
    def issue(
        cls, run_id: str, issuer: Identity, delegation: Delegation | None, uses: int, expires: float
    ) -> Token:
        """Issue a new one, signed by `issuer`: the owner, or whoever the `delegation` names."""
        seed = os.urandom(32)
        key = Identity(seed)
        plain = Invitation(os.urandom(SERIAL_BYTES), key.public_key, uses, expires, delegation=delegation)
        return cls(run_id, replace(plain, signature=issuer.sign(plain.signed(run_id))), key, seed)

    @classmethod
    def from_text(cls, text: str) -> Token:
        """Read a token; whether it is signed, readers of `credential` see.

        Raises `TokenError` with what to do for what is no token.
        """
        body = text.strip().removeprefix(_PREFIX)
        try:
            if len(body) > MAX_TOKEN_CHARACTERS:
                raise RecordError("too long")
            raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            match _unpacked(raw):
                case [str(run_id), bytes(seed), *parts] if len(seed) == 32:
                    return cls(run_id, _invitation_of(parts), Identity(seed), seed)
            raise RecordError("of another form")
        except (RecordError, binascii.Error, ValueError):
            raise TokenError(
                "This is not a token, or not all of it. Copy it again: one line that noloco invite printed. If it is "
                f"whole, a later version made it. Upgrade this one: {upgrade_line()}"
            ) from None

    def to_text(self) -> str:
        packed = msgpack.packb([self.run_id, self._seed, *self.invitation.parts()])
        return _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def credential(self, peer: str) -> bytes:
        """The credential that `peer` shows; the same for the same peer."""
        return Credential(self.invitation, self._key.sign(_use_of(self.run_id, peer))).to_bytes()


def _use_of(run_id: str, peer: str) -> bytes:
    packed: bytes = msgpack.packb([run_id, public_key_of(peer)])
    return _USE + packed


def _unpacked(raw: bytes) -> object:
    try:
        contents: object = msgpack.unpackb(raw, max_array_len=16, max_map_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("not msgpack") from error
    return contents


def _invitation_of(parts: object) -> Invitation:
    match parts:
        case [bytes(serial), bytes(key), int(uses), float(expires), bytes(signature), given] if (
            len(serial) == SERIAL_BYTES and 0 < uses <= MAX_USES and is_time(expires)
        ):
            return Invitation(serial, key, uses, expires, signature, _delegation_of(given))
    raise RecordError("not an invitation")


def _delegation_of(parts: object) -> Delegation | None:
    match parts:
        case None:
            return None
        case [bytes(key), float(expires), bytes(signature)] if is_time(expires):
            return Delegation(key, expires, signature)
    raise RecordError("not a delegation")
