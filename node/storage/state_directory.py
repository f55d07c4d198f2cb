"""The state directory of a node: its key, the manifest, its port, the peer book and its stages' checkpoints.

Enough to come back as the same peer, also after the whole swarm was down. Files are replaced whole: written
beside, flushed to disk, renamed.
"""

from __future__ import annotations

import json
import logging
import threading
from itertools import count
from pathlib import Path
from typing import TypeVar

from node.storage.checkpoint_files import (
    OF_ONE_STAGE,
    OLDER_NAME,
    OWN_NAME,
    PATTERN,
    Checkpoint,
    KeptCheckpoint,
    contents_of,
    header_of,
    path_of,
    read,
    set_aside_path,
    superfluous,
)
from protocol.access.tokens import Token
from protocol.errors import LaterVersion, ManifestError, StateError, TokenError
from protocol.files.keeping import Lock, advice_for, own, replace_whole, small_json
from protocol.records.addresses import is_address
from protocol.records.identity import Identity
from protocol.run.piece_hashes import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_HASHES_BYTES
from protocol.run.signed_manifest import SignedManifest
from protocol.windows import window

# under names that a user may have given to other files: those are not replaced
WRITTEN = {
    "token",
    "tokenizer.json",
    "tokenizer.hashes",
    "node.json",
    "peers.json",
    "given.json",
    "past.msgpack",
    "events.jsonl",
    "node.log",
}

logger = logging.getLogger(__name__)

J = TypeVar("J")

MAX_PEER_BOOK = 256
MOST_PAST_BYTES = 64 * 1024 * 1024


class StateDirectory:
    """One node's directory; locked while the node runs, so that no second one takes its identity."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Lock | None = None
        self._saving = threading.Lock()  # a save whose caller gave up still writes

    @window
    def __repr__(self) -> str:
        return f"{self.path} | {'closed' if self._lock is None else 'open'}"

    def exists(self) -> bool:
        """Return whether a node has been a member of a run from here."""
        return (self.path / "manifest.noloco").exists()

    def open(self) -> None:
        """Create and lock the directory. Raises `StateError`."""
        self._lock = own(
            self.path, "--state-dir", is_private=True, writes=WRITTEN
        )  # keys, a token, prepared text

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- who this node is ---------------------------------------------------------------------

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.key"

    def identity(self) -> Identity:
        return Identity.load_or_create(self.identity_path)

    def manifest(self) -> SignedManifest | None:
        path = self.path / "manifest.noloco"
        try:
            return SignedManifest.from_bytes(self._read(path)) if path.exists() else None
        except LaterVersion as later:
            raise LaterVersion(f"{path} cannot be used: {later}") from None
        except ManifestError as damage:
            raise ManifestError(
                f"{path} cannot be used: {str(damage).split('. ')[0].rstrip('.')}. Delete it, and name a member with "
                "--join: this node gets it again."
            ) from None

    def save_manifest(self, signed: SignedManifest) -> None:
        known = self.manifest()
        if known is not None and known.run_id != signed.run_id:
            raise StateError(
                f"{self.path} belongs to run {known.run_id}, but the peers reached train run "
                f"{signed.run_id}. Give each run a directory of its own with --state-dir."
            )
        self._replace(self.path / "manifest.noloco", signed.to_bytes())

    def token(self) -> str:
        """The token by which this node came into a private run; empty if it needed none. Raises `StateError` for no
        token.
        """
        path = self.path / "token"
        if not path.exists():
            return ""
        token = self._read(path).decode(errors="replace")
        try:
            Token.from_text(token)
        except TokenError:
            raise StateError(f"{path} is damaged. Give the token of this run again with --token.") from None
        return token

    def save_token(self, token: str) -> None:
        self._replace(self.path / "token", token.encode())

    @property
    def revoked_path(self) -> Path:
        return self.path / "revoked.noloco"

    def revoked(self, sealed: bytes = b"") -> bytes:
        """The last list of revocations, unchecked; a newer one is kept in its place."""
        path = self.revoked_path
        known = self._read(path) if path.exists() else b""
        if sealed and sealed != known:
            self._replace(path, sealed)
        return sealed or known

    def tokenizer(self) -> bytes | None:
        """The run's tokenizer.json as it was kept, unchecked; None when there is none, or it is no such file."""
        return self._small("tokenizer.json", MAX_TOKENIZER_BYTES)

    def tokenizer_hashes(self) -> bytes:
        """The sealed hashes of its pieces as they were kept, unchecked; empty when there are none."""
        return self._small("tokenizer.hashes", MAX_TOKENIZER_HASHES_BYTES) or b""

    def save_tokenizer(self, raw: bytes, hashes: bytes = b"") -> None:
        """Keep the tokenizer.json and, if there are any, the sealed hashes of its pieces."""
        self._replace(self.path / "tokenizer.json", raw)
        if hashes:
            self._replace(self.path / "tokenizer.hashes", hashes)

    def _small(self, name: str, most: int) -> bytes | None:
        """The contents of a file; None when there is none, or it has more than `most` bytes."""
        path = self.path / name
        if not path.exists() or path.stat().st_size > most:
            return None
        return self._read(path)

    # --- where it was and whom it knew --------------------------------------------------------

    def remember(self, **facts: object) -> None:
        """Merge small facts (port, stage, tokens) into node.json."""
        self._replace(self.path / "node.json", json.dumps(self.facts() | facts).encode())

    def facts(self) -> dict[str, object]:
        return self._json("node.json", dict)

    def peer_book(self) -> list[str]:
        """Addresses of peers met before, latest first."""
        known = [address for address in self._json("peers.json", list) if isinstance(address, str)]
        return known[:MAX_PEER_BOOK]

    def addresses(self) -> list[str]:
        """The addresses of the peer book that can be dialled: one that is damaged keeps nobody from the others."""
        return [address for address in self.peer_book() if is_address(address)]

    def save_peer_book(self, addresses: list[str]) -> None:
        self._replace(self.path / "peers.json", json.dumps(addresses[:MAX_PEER_BOOK]).encode())

    def past(self) -> bytes:
        """Who has served the run's stages, as `node.membership.past` wrote it; unchecked, empty where nothing is."""
        path = self.path / "past.msgpack"
        return self._read(path) if path.exists() and path.stat().st_size <= MOST_PAST_BYTES else b""

    def save_past(self, contents: bytes) -> None:
        self._replace(self.path / "past.msgpack", contents)

    def given(self) -> int:
        """Tokens that all lives of this node have trained on; 0 where that is not known."""
        tokens = self._json("given.json", dict).get("tokens")
        return tokens if isinstance(tokens, int) and 0 <= tokens < 2**63 else 0

    def save_given(self, tokens: int) -> None:
        self._replace(self.path / "given.json", json.dumps({"tokens": tokens}).encode())

    @property
    def ledger_path(self) -> Path:
        return self.path / "contribution.json"

    def save_ledger(self, text: str) -> None:
        self._replace(self.ledger_path, text.encode())

    # --- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(self, run_id: str, checkpoint: Checkpoint) -> None:
        """Replace the stage's last checkpoint; the old one stays valid until the new one is whole on disk.

        One of an older lineage is set aside first: a stage that was begun anew may still get its past back. Raises
        `LaterVersion` where a later version's file is in the way, which stays.
        """
        path = path_of(self.path, checkpoint.stage)
        with self._saving:
            self._require_no_later(path)
            known = next((kept for kept in self.kept(run_id) if kept.stage == checkpoint.stage), None)
            if known is not None and known.lineage.is_before(checkpoint.state.lineage, 0.0):
                if not self._has_older(known):
                    known.path.replace(set_aside_path(self.path, checkpoint.stage))
                known = None
            self._replace(path, *contents_of(run_id, checkpoint))
            if known is not None and known.path != path:  # the one file of an earlier version
                known.path.unlink(missing_ok=True)

    def _require_no_later(self, path: Path) -> None:
        """Raise `LaterVersion` for a checkpoint that a later version wrote; a damaged one may be replaced."""
        try:
            if path.is_file():
                header_of(path)
        except LaterVersion:
            raise
        except StateError as damage:
            logger.debug("%s", damage)

    def _has_older(self, known: KeptCheckpoint) -> bool:
        """Return whether one of a still older lineage was set aside before: of three lineages the oldest stays."""
        aside = set_aside_path(self.path, known.stage)
        older = self._headers(known.run, [aside] if aside.is_file() else [])
        return any(one.lineage.is_before(known.lineage, 0.0) for one in older)

    def checkpoint(self, run_id: str, stage: int | None = None) -> Checkpoint | None:
        """The last checkpoint of this run, of one stage or of any.

        One that is damaged is put aside where an older one of its stage can be read, which is told; otherwise this
        raises `StateError`, and all stays as it is.
        """
        kept = self.kept(run_id)
        if stage is not None:
            kept = [one for one in kept if one.stage == stage]
            last = path_of(self.path, stage)
        else:
            last = max(self._checkpoint_paths(), key=_age, default=self.path)
        if not last.is_file() or last in [one.path for one in kept]:
            if not kept:
                return None
            last = max(kept, key=lambda one: (one.saved, _age(one.path))).path
        try:
            run, checkpoint = read(last)
        except LaterVersion:
            raise
        except StateError as damage:
            older = self._older_than(last, run_id)
            if older is None:
                raise
            logger.warning(
                "%s Going on from the older %s.", str(damage).split(". Delete it")[0] + ".", older[0]
            )
            self._put_aside(last)
            return older[1]
        if run == run_id:
            return checkpoint
        return read(max(kept, key=lambda one: (one.saved, _age(one.path))).path)[1] if kept else None

    def _older_than(self, damaged: Path, run_id: str) -> tuple[Path, Checkpoint] | None:
        """An older checkpoint of the same stage and run that can be read, if there is one beside the damaged one."""
        name = OWN_NAME.fullmatch(damaged.name)
        if name is None:
            return None
        for path in (self.path / OF_ONE_STAGE, set_aside_path(self.path, int(name[1]))):
            try:
                run, checkpoint = read(path) if path.is_file() else ("", None)
            except StateError as damage:
                logger.debug("%s", damage)
                continue
            if checkpoint is not None and (run, checkpoint.stage) == (run_id, int(name[1])):
                return path, checkpoint
        return None

    def _put_aside(self, damaged: Path) -> None:
        """Rename a damaged file, so that the next one that is saved does not replace what may be rescued of it."""
        names = (damaged.with_name(f"{damaged.name}.damaged{number or ''}") for number in count())
        aside = next(path for path in names if not path.exists())
        try:
            damaged.replace(aside)
        except OSError as error:
            raise StateError(f"Cannot rename {damaged} ({error.strerror}). Check its permissions.") from None
        logger.warning("The damaged file is %s from now on.", aside)

    def kept(self, run_id: str) -> list[KeptCheckpoint]:
        """What the checkpoints of this run say of themselves, one for each stage; damaged ones are passed over."""
        found: dict[int, KeptCheckpoint] = {}
        for kept in self._headers(run_id, self._checkpoint_paths()):
            if kept.stage not in found or kept.path == path_of(self.path, kept.stage):
                found[kept.stage] = kept
        return list(found.values())

    def kept_with_older(self, run_id: str) -> list[KeptCheckpoint]:
        """As `kept`, with those of older lineages that were set aside, of which there is one for each stage."""
        older = [path for path in self.path.glob(PATTERN) if OLDER_NAME.fullmatch(path.name)]
        return self.kept(run_id) + self._headers(run_id, sorted(older))

    def _headers(self, run_id: str, paths: list[Path]) -> list[KeptCheckpoint]:
        found = []
        for path in paths:
            try:
                found.append(header_of(path))
            except StateError as damage:
                logger.debug("%s", damage)
        return [kept for kept in found if kept.run == run_id]

    def prune(self, run_id: str, stage: int, now: float, most_stages: int, most_seconds: float) -> None:
        """Delete checkpoints of stages that this node, now at `stage`, served longest ago, see `superfluous`."""
        for kept in superfluous(self.kept(run_id), stage, now, most_stages, most_seconds):
            logger.info("Deleting the checkpoint of stage %d at step %d: it is old.", kept.stage, kept.step)
            kept.path.unlink(missing_ok=True)

    def _checkpoint_paths(self) -> list[Path]:
        own = [path for path in self.path.glob(PATTERN) if OWN_NAME.fullmatch(path.name)]
        former = self.path / OF_ONE_STAGE
        return sorted(own) + ([former] if former.is_file() else [])

    # --- files --------------------------------------------------------------------------------

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise StateError(f"Cannot read {path} ({error.strerror}). Check its permissions.") from None

    def _json(self, name: str, kind: type[J]) -> J:
        """The contents of a small file; empty when it is missing, or damaged, which is told: it is learned again."""
        path = self.path / name
        if not path.exists():
            return kind()
        contents = small_json(path)
        if isinstance(contents, kind):
            return contents
        logger.warning("%s is damaged; this node goes on without what was in it.", path)
        return kind()

    def _replace(self, path: Path, *contents: bytes | memoryview) -> None:
        try:
            replace_whole(path, *contents)
        except OSError as error:
            advice = advice_for(error)
            raise StateError(
                f"Cannot write {path} ({error.strerror}). {advice}; what was saved before is still valid."
            ) from None


def _age(path: Path) -> float:
    """The time of the last change, for comparison; 0 for a file that is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
