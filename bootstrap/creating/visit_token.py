"""The token by which a founder's page and tools look at a private run, from the directory that its keys are in."""

from __future__ import annotations

import time
from pathlib import Path

from bootstrap.display import write_whole
from protocol.access.tokens import Token
from protocol.errors import NolocoError
from protocol.files.keeping import FOR_ITS_OWNER
from protocol.records.identity import Identity
from protocol.run.signed_manifest import SignedManifest

RUN_KEY = "run.key"
VISIT_TOKEN = "visits.token"  # so that the run's key need not stay with the seed peer
YEARS = 20
PASSING_SECONDS = 3_600.0  # of the token of one visit


def kept_visit_token(directory: Path, signed: SignedManifest) -> str:
    """Return the token kept beside the keys, made while the run's key is there; empty for an open run, or without
    both. Raises `StateError` when it cannot be written.
    """
    if not signed.manifest.access.private:
        return ""
    place = directory / VISIT_TOKEN
    if kept := _kept(place, signed.run_id):
        return kept
    issued = issued_token(directory, signed, YEARS * 365.25 * 86_400)
    if issued:
        write_whole(place, issued, "Choose another --state-dir.", mode=FOR_ITS_OWNER)
    return issued


def passing_visit_token(directory: Path, signed: SignedManifest) -> str:
    """Return a token for one peer and an hour, which is nowhere written; without the run's key the one kept beside
    it, or nothing.
    """
    return issued_token(directory, signed, PASSING_SECONDS) or _kept(directory / VISIT_TOKEN, signed.run_id)


def issued_token(directory: Path, signed: SignedManifest, seconds: float) -> str:
    """Issue a token of one use; empty without the key that signed the manifest."""
    key = run_key(directory, signed)
    if key is None:
        return ""
    return Token.issue(signed.run_id, key, None, 1, time.time() + seconds).to_text()


def run_key(directory: Path, signed: SignedManifest) -> Identity | None:
    """The key that signed the manifest; None when it is elsewhere. Raises `StateError` when it is damaged."""
    if not (directory / RUN_KEY).exists():
        return None
    key = Identity.load(directory / RUN_KEY)
    return key if key.public_key == signed.public_key else None


def _kept(place: Path, run_id: str) -> str:
    """The token in a file, if it is one of this run that is not over."""
    try:
        token = Token.from_text(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, NolocoError):
        return ""
    return token.to_text() if token.run_id == run_id and token.invitation.ends > time.time() else ""
