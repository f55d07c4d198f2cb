"""Signing tokens, delegations and lists of revocations with a run's key."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack

from bootstrap.creating.run import REVOKED, RUN_KEY, revocations_in, signed_in
from bootstrap.display import write_whole, writing
from bootstrap.inspect.observer import visit
from node.membership.discovery import DHT_DEADLINE
from protocol.access.revocations import MOST_REVOKED, Revocations, mark_of, revoked_key
from protocol.access.tokens import SERIAL_BYTES, Delegation, Token
from protocol.errors import JoinError, StateError, TokenError, later
from protocol.files.keeping import create_whole, one_after_another
from protocol.ground import is_time
from protocol.records.identity import Identity, is_peer_id, public_key_of
from protocol.records.records import MAX_LIFETIME
from protocol.run.signed_manifest import SignedManifest

DAY = 86_400.0
REVOKING = "revoking.lock"  # beside the list, while one is added to it
VISIT_DAYS = 0.01  # of the token by which the owner comes in to tell what it has revoked


@dataclass(frozen=True)
class Issuer:
    """A key that signs invitations to a run: the owner's, or a delegate's."""

    run_id: str
    key: Identity
    delegation: Delegation | None = None

    @classmethod
    def owner(cls, directory: Path) -> Issuer:
        """The run's owner. Raises `StateError` without its key or manifest, `TokenError` for a run that is open."""
        signed = signed_in(directory)
        if not signed.manifest.access.private:
            raise TokenError(
                f"Run '{signed.manifest.name}' is open: everybody may join it, with the line that noloco-bootstrap "
                "printed. A private one is founded with access.private in its manifest."
            )
        return cls(signed.run_id, run_key_in(directory, signed))

    @classmethod
    def delegate(cls, file: Path) -> Issuer:
        """The delegate of a file. Raises `StateError` for one that `write_delegate` has not written."""
        try:
            match msgpack.unpackb(file.read_bytes()):
                case [str(run_id), bytes(seed), float(expires), bytes(signature)] if len(
                    seed
                ) == 32 and is_time(expires):
                    key = Identity(seed)
                    return cls(run_id, key, Delegation(key.public_key, expires, signature))
        except OSError as error:
            raise StateError(
                f"Cannot read the delegate's file {file} ({error.strerror}). Check --delegate."
            ) from None
        except (ValueError, msgpack.UnpackException):
            pass
        raise StateError(f"{file} is no delegate's file, or not all of it. Ask the run's owner for it again.")

    def invite(self, uses: int, days: float) -> Token:
        return Token.issue(self.run_id, self.key, self.delegation, uses, time.time() + days * DAY)


def is_open(directory: Path) -> bool:
    """Return whether everybody may join the run of `directory`. Raises `StateError`."""
    return not signed_in(directory).manifest.access.private


def run_key_in(directory: Path, signed: SignedManifest) -> Identity:
    """The key that the run's manifest is signed with. Raises `StateError` where there is none, or another one."""
    key = Identity.load(directory / RUN_KEY)
    if key.public_key != signed.public_key:
        raise StateError(
            f"{directory / RUN_KEY} is the key of another run, and the manifest beside it is of run {signed.run_id}. "
            "Name the run's own directory with --state-dir, or put its run.key back from your copy."
        )
    return key


def write_delegate(directory: Path, file: Path, days: float) -> str:
    """Write a delegate's key and return the mark to revoke it by. The file is readable by its owner only."""
    issuer, seed = Issuer.owner(directory), os.urandom(32)
    key, expires = Identity(seed), time.time() + days * DAY
    given = Delegation.sign(issuer.key, issuer.run_id, key.public_key, expires)
    with writing(file, "Choose another file."):
        create_whole(file, msgpack.packb([issuer.run_id, seed, expires, given.signature]))
    return mark_of(key.public_key).hex()


def revoked_with(directory: Path, named: Sequence[str]) -> bytes:
    """Add these to the run's list, signed and written to the directory. Raises `StateError` or `TokenError`.

    Those who revoke at the same time do so one after another: no entry is lost.
    """
    signed = signed_in(directory)
    key = run_key_in(directory, signed)
    place = directory / REVOKED
    with writing(place, "Check --state-dir."), one_after_another(directory / REVOKING):
        known = revocations_in(directory, signed)
        entries = known.entries | {_entry(name) for name in named}
        if len(entries) > MOST_REVOKED:
            raise TokenError(
                f"A list holds {MOST_REVOKED} entries. Found a new run and invite anew who is to stay."
            )
        sealed = Revocations(max(time.time(), known.issued + 1e-3), entries).sign(signed.run_id, key)
        write_whole(place, sealed, "Check --state-dir.")
    return sealed


def _entry(named: str) -> bytes:
    if is_peer_id(named):
        return mark_of(public_key_of(named))
    try:
        if len(named) == 2 * SERIAL_BYTES:
            return bytes.fromhex(named)
    except ValueError:
        pass
    return Token.from_text(named).invitation.serial


async def publish(directory: Path, join: Sequence[str], sealed: bytes) -> None:
    """Bring a list to a member. Raises `JoinError` when nobody answers or takes it."""
    signed = signed_in(directory)
    token = Issuer.owner(directory).invite(1, VISIT_DAYS).to_text() if signed.manifest.access.private else ""
    async with visit(join, token) as observer:
        key = revoked_key(signed.run_id)
        if not await observer.transport.put(key, sealed, MAX_LIFETIME, DHT_DEADLINE):
            raise later(
                JoinError("No peer has taken the list. Try again, with the address of another member.")
            )
