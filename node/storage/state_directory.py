"""The state directory of a node: its key, the manifest, its port, the peer book and the last checkpoint.

Enough to come back as the same peer, also after the whole swarm was down. Files are replaced whole: written
beside, flushed to disk, renamed.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import safetensors
import torch

from node.data.batches import Position
from node.model.flat import StageState
from protocol.errors import ManifestError, StateError, TokenError
from protocol.identity import Identity
from protocol.keeping import Lock, advice_for, own, replace_whole
from protocol.messages.peers import MAX_TOKENIZER_BYTES
from protocol.signed_manifest import SignedManifest
from protocol.tokens import Token
from protocol.windows import window

OF_FACTS = "facts_crc32"  # in a checkpoint: the checksum of
FACTS = {
    "run", "stage", "step", "round", "saved", "steps_in_round", "updates", "tokens", "position", "crc32"
}  # fmt: skip

# under names that a user may have given to other files: those are not replaced
WRITTEN = {"token", "tokenizer.json", "node.json", "peers.json", "given.json", "events.jsonl", "node.log"}

logger = logging.getLogger(__name__)

J = TypeVar("J")

MAX_PEER_BOOK = 256


@dataclass(frozen=True)
class Checkpoint:
    stage: int
    state: StageState
    position: Position | None = None  # in the data, of a node that has trained on some
    tokens: int = 0  # that this node has trained on at the stage
    saved: float = 0.0  # when, on the wall clock; 0 is not known


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
        path = self.path / "tokenizer.json"
        if not path.exists() or path.stat().st_size > MAX_TOKENIZER_BYTES:
            return None
        return self._read(path)

    def save_tokenizer(self, raw: bytes) -> None:
        self._replace(self.path / "tokenizer.json", raw)

    # --- where it was and whom it knew --------------------------------------------------------

    def remember(self, **facts: object) -> None:
        """Merge small facts (port, stage, tokens) into node.json."""
        self._replace(self.path / "node.json", json.dumps(self.facts() | facts).encode())

    def facts(self) -> dict[str, object]:
        return self._json("node.json", dict)

    def peer_book(self) -> list[str]:
        """Addresses of peers met before, latest first."""
        return [address for address in self._json("peers.json", list) if isinstance(address, str)]

    def save_peer_book(self, addresses: list[str]) -> None:
        self._replace(self.path / "peers.json", json.dumps(addresses[:MAX_PEER_BOOK]).encode())

    def given(self) -> int:
        """Tokens that all lives of this node have trained on; 0 where that is not known."""
        tokens = self._json("given.json", dict).get("tokens")
        return tokens if isinstance(tokens, int) else 0

    def save_given(self, tokens: int) -> None:
        self._replace(self.path / "given.json", json.dumps({"tokens": tokens}).encode())

    @property
    def ledger_path(self) -> Path:
        return self.path / "contribution.json"

    def save_ledger(self, text: str) -> None:
        self._replace(self.ledger_path, text.encode())

    # --- checkpoint ---------------------------------------------------------------------------

    def save_checkpoint(self, run_id: str, checkpoint: Checkpoint) -> None:
        """Replace the last checkpoint; the old one stays valid until the new one is whole on disk."""
        state = checkpoint.state
        facts = {
            "run": run_id,
            "stage": str(checkpoint.stage),
            "step": str(state.step),
            "round": str(state.round),
            "saved": str(checkpoint.saved),
            "steps_in_round": str(state.steps_in_round),
            "updates": str(state.updates),
            "tokens": str(checkpoint.tokens),
            "position": json.dumps(checkpoint.position.facts() if checkpoint.position else None),
        }
        tensors = state.tensors()
        facts["crc32"] = str(_checksum(tensors))
        facts[OF_FACTS] = str(_checksum_of(facts))
        with self._saving:
            self._replace(self.path / "checkpoint.safetensors", *_safetensors(tensors, facts))

    def checkpoint(self, run_id: str) -> Checkpoint | None:
        """The last checkpoint of this run. Raises `StateError` when it is damaged, or of an older version."""
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                facts = dict(file.metadata())
                tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            of_facts = facts.pop(OF_FACTS, None)  # those of earlier versions have none
            if facts.keys() != FACTS or of_facts not in (None, str(_checksum_of(facts))):
                raise ValueError("its numbers are not those that were written")
            if facts["run"] != run_id:
                return None
            if int(facts["crc32"]) != _checksum(tensors):
                raise ValueError("its checksum does not fit")
            position = Position.of(json.loads(facts["position"]))
            stage, tokens, saved = int(facts["stage"]), int(facts["tokens"]), float(facts["saved"])
            return Checkpoint(stage, _state_of(facts, tensors), position, tokens, saved)
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
            raise StateError(
                f"The checkpoint {path} is damaged, or of an older version ({error}). Delete it: the node then "
                "downloads its stage from other replicas."
            ) from None

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
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            contents = None
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


def _safetensors(tensors: dict[str, torch.Tensor], facts: dict[str, str]) -> list[bytes | memoryview]:
    """A file of float32 tensors in the format of safetensors, whose own writer copies all of them first."""
    header: dict[str, object] = {"__metadata__": facts}
    start = 0
    for name, tensor in tensors.items():
        stop = start + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    parts = [tensor.contiguous().numpy().data.cast("B") for tensor in tensors.values()]
    return [len(text).to_bytes(8, "little"), text, *parts]


def _state_of(facts: dict[str, str], tensors: dict[str, torch.Tensor]) -> StageState:
    """Make a state of a checkpoint's contents.

    Raises `KeyError`, `ValueError` or `TypeError` for what is missing, or should not be there.
    """
    step, round_, in_round, updates = (int(facts[n]) for n in ("step", "round", "steps_in_round", "updates"))
    return StageState(step, round_, in_round, updates, **tensors)


def _checksum_of(facts: dict[str, str]) -> int:
    """Checksum of what stands beside the tensors: a step, a round or a position that nobody ever reached."""
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    """CRC-32 over the tensors' bytes: a flipped bit on the disk must not train on."""
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].contiguous().numpy().data.cast("B"), checksum)
    return checksum
