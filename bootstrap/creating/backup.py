"""Backups of a run's or a node's directory: the small files that nobody else has, in one file under a passphrase.

The file begins with "noloco backup" and the number of the directory's format. A salt and a nonce follow, and a
msgpack map from names to contents, sealed by AES-256-GCM (NIST SP 800-38D) under the key that scrypt (RFC 7914)
makes of the passphrase. States of stages are not in it: other members have those.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from bootstrap.creating.run import MANIFEST, REVOKED, SEED_CREDENTIAL, SEED_KEY
from bootstrap.creating.visit_token import RUN_KEY, VISIT_TOKEN
from bootstrap.display import writing
from protocol.errors import LaterVersion, ManifestError, StateError
from protocol.files.installation import upgrade_line
from protocol.files.keeping import FORMAT, advice_for, create_whole, own, require_format
from protocol.run.signed_manifest import SignedManifest

NODE_KEY = "identity.key"
KEYS = {
    RUN_KEY: "signs invitations and plans: without it nobody can be invited or revoked",
    SEED_KEY: "is the seed peer: without it the addresses that people were given lead nowhere",
    NODE_KEY: "is the node: without it a new peer, and what it gave counts for somebody else",
}
KEPT = (
    *KEYS, SEED_CREDENTIAL, "token", VISIT_TOKEN, REVOKED, "tokenizer.json", "tokenizer.hashes",
    "addresses.txt", "node.json", "peers.json", "given.json", "contribution.json", "past.msgpack",
    MANIFEST,  # at last: it makes a directory one of a run
)  # fmt: skip
BEGINNING = re.compile(rb"noloco backup (\d{1,4})\n")
SALT_BYTES, NONCE_BYTES = 16, 12
COST, BLOCK = 2**17, 8  # scrypt's N and r: 128 MiB, half a second
MOST_BYTES = 256 * 1024 * 1024
SHORTEST = 8  # characters of a passphrase


@dataclass(frozen=True)
class Backup:
    """The files of a backup by name, and the run that they are of."""

    files: Mapping[str, bytes]
    run: str

    @property
    def of(self) -> str:
        return f"run '{self.run}'" if self.run else "a node without a run"

    @property
    def keys(self) -> list[str]:
        return [name for name in KEYS if name in self.files]


def gather(directory: Path) -> Backup:
    """Read what a backup of a directory has. Raises `StateError` where no run is, or a file cannot be read."""
    require_format(directory, "--state-dir")
    files = dict[str, bytes]()
    for name in KEPT:
        path = directory / name
        try:
            if path.is_file():
                files[name] = path.read_bytes()
        except OSError as error:
            raise StateError(f"Cannot read {path} ({error.strerror}). {advice_for(error)}.") from None
    if not any(name in files for name in KEYS):
        raise StateError(
            f"{directory} has no keys of a run or a node. Name the directory of noloco found or of a node with "
            "--state-dir."
        )
    return Backup(files, _run_of(files, f"{directory}/{MANIFEST}"))


def sealed(backup: Backup, passphrase: str) -> bytes:
    """Return the contents of a backup's file. Raises `StateError` for a passphrase of less than `SHORTEST`."""
    if len(passphrase) < SHORTEST:
        raise StateError(f"The passphrase is too short: take at least {SHORTEST} characters.")
    salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
    beginning, contents = b"noloco backup %d\n" % FORMAT, msgpack.packb(dict(backup.files))
    file = beginning + salt + nonce + AESGCM(_key(passphrase, salt)).encrypt(nonce, contents, beginning)
    if len(file) > MOST_BYTES:  # `opened` would refuse it
        largest = max(backup.files, key=lambda name: len(backup.files[name]))
        raise StateError(
            f"The files are too large for a backup; the largest is {largest}. Copy the directory."
        )
    return file


def opened(file: Path, passphrase: str) -> Backup:
    """Read a backup's file. Raises `StateError` for another passphrase, a damaged file, or one that is none."""
    try:
        with file.open("rb") as there:
            raw = there.read(MOST_BYTES + 1)
    except OSError as error:
        raise StateError(f"Cannot read {file} ({error.strerror}). {advice_for(error)}.") from None
    found = BEGINNING.match(raw)
    if found is None or len(raw) > MOST_BYTES:
        raise StateError(f"{file} is no backup. Name the file that noloco backup wrote.")
    if int(found[1]) > FORMAT:
        raise LaterVersion(
            f"{file} is of a later version. Upgrade this program ({upgrade_line()}), and restore it then."
        )
    rest = raw[found.end() :]
    salt, nonce, secret = rest[:SALT_BYTES], rest[SALT_BYTES:][:NONCE_BYTES], rest[SALT_BYTES + NONCE_BYTES :]
    try:
        files = msgpack.unpackb(AESGCM(_key(passphrase, salt)).decrypt(nonce, secret, found[0]))
        if not isinstance(files, dict) or not all(isinstance(part, bytes) for part in files.values()):
            raise ValueError
    except (InvalidTag, ValueError, TypeError, msgpack.UnpackException):
        raise StateError(
            f"{file} does not open: the passphrase is another one, or the file is damaged."
        ) from None
    return Backup({name: files[name] for name in KEPT if name in files}, _run_of(files, str(file)))


def restore(backup: Backup, directory: Path) -> None:
    """Write the files into a directory that has none of them, all or none.

    Raises `StateError`; what was there before is then as it was.
    """
    written, advice = list[Path](), "Choose another --state-dir."
    with writing(directory, advice):
        taken = sorted(name for name in backup.files if (directory / name).exists())
    if taken:
        raise StateError(
            f"{directory} has a {taken[0]} already, which stays. Choose another --state-dir, or move it away."
        )
    with writing(directory, advice), own(directory, "--state-dir", is_private=True):
        try:
            for name in KEPT:
                if name in backup.files:
                    create_whole(directory / name, backup.files[name])
                    written.append(directory / name)
        except BaseException:  # Ctrl-C as well
            for path in written:
                with suppress(OSError):
                    path.unlink()
            raise


def _run_of(files: Mapping[str, bytes], where: str) -> str:
    """The run's name; empty for a directory whose node has not joined one yet. Raises for a damaged manifest."""
    if MANIFEST not in files:
        return ""
    try:
        return SignedManifest.from_bytes(files[MANIFEST]).manifest.name
    except ManifestError as error:
        raise StateError(f"{where} cannot be used: {error}") from None


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=COST, r=BLOCK, p=1).derive(passphrase.encode())
