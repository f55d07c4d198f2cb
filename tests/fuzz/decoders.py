"""Everything that turns others' bytes into something else, each as a function of bytes.

It may refuse them, with an error of ours; anything else that comes out of it is a bug.
"""

from __future__ import annotations

import contextlib
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgpack

from node.data.tokenizer import FileTokenizer
from node.storage.state_directory import StateDirectory
from protocol.access import revocations
from protocol.access.revocations import Revocations
from protocol.access.tokens import Credential, Token
from protocol.errors import NolocoError, RecordError, UserError
from protocol.ground import Record
from protocol.records.addresses import check_address, host_of
from protocol.records.announcement import Announcement, Claim
from protocol.records.identity import Identity
from protocol.records.records import authenticate, key_digest
from protocol.run import placement_plan, signed_manifest
from protocol.run.manifest import manifest_from
from protocol.run.piece_hashes import PieceHashes
from protocol.run.placement_plan import open_plan
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.dht_guard import decode
from tests.unit.test_frames import message_of, read

OWNER = Identity.from_seed("owner")
TOKENIZER = "sha256:" + 64 * "0"  # as a manifest names it
RUN = "0" * 32
KEY = f"noloco/{RUN}/stage/0"
LIMIT = 1 << 16


def _frame(raw: bytes) -> None:
    frame = read(raw, LIMIT)
    message_of(frame)
    frame.tensors()


def _record(raw: bytes) -> None:
    authenticate(key_digest(KEY), OWNER.peer_id, raw, 2e9)


def _announcement(raw: bytes) -> None:
    record = Record(OWNER.peer_id, raw, 2e9)
    for kind in (Announcement, Claim):
        with contextlib.suppress(RecordError):
            kind.read(record)


def _dht_value(raw: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(raw)


def _manifest(raw: bytes) -> None:
    """Whose owner wrote it, and signed what no program of ours makes."""
    signature = OWNER.sign(signed_manifest._SIGNATURE_DOMAIN + raw)
    SignedManifest.from_bytes(msgpack.packb([OWNER.public_key, raw, signature]))


def _sealed_manifest(raw: bytes) -> None:
    SignedManifest.from_bytes(raw)


def _toml(raw: bytes) -> None:
    with contextlib.suppress(UnicodeDecodeError, tomllib.TOMLDecodeError):
        manifest_from(tomllib.loads(raw.decode()))


def _revocations(raw: bytes) -> None:
    sealed = msgpack.packb([raw, OWNER.sign(revocations._DOMAIN + raw)])
    for one in (raw, sealed):
        with contextlib.suppress(RecordError):
            Revocations.read(one, RUN, OWNER.public_key)


def _plan(raw: bytes) -> None:
    sealed = msgpack.packb([raw, OWNER.sign(placement_plan._DOMAIN + raw)])
    for one in (raw, sealed):
        with contextlib.suppress(RecordError):
            open_plan(one, OWNER.public_key, RUN, 1.7e9)


def _credential(raw: bytes) -> None:
    Credential.read(raw, RUN, OWNER.public_key, OWNER.peer_id)


def _token(raw: bytes) -> None:
    Token.from_text(raw.decode("latin-1"))


def _address(raw: bytes) -> None:
    text = raw.decode("latin-1")
    host_of(text)
    check_address(text)


def _piece_hashes(raw: bytes) -> None:
    PieceHashes.read(raw, TOKENIZER, OWNER.public_key)


def _tokenizer(raw: bytes) -> None:
    FileTokenizer(raw, "<end>").encode_batch(["some text, and <end> in it"])


def _checkpoint(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoint-0.safetensors").write_bytes(raw)
        StateDirectory(Path(folder)).checkpoint(RUN)


DECODERS: dict[str, Callable[[bytes], None]] = {
    "frame": _frame,
    "record": _record,
    "announcement": _announcement,
    "dht-value": _dht_value,
    "manifest": _manifest,
    "sealed-manifest": _sealed_manifest,
    "toml": _toml,
    "revocations": _revocations,
    "plan": _plan,
    "credential": _credential,
    "token": _token,
    "address": _address,
    "piece-hashes": _piece_hashes,
    "tokenizer": _tokenizer,
    "checkpoint": _checkpoint,
}
CORPUS = Path(__file__).parent / "corpus"


def corpus_of(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]


def survives(name: str, raw: bytes) -> bool:
    """True. Raises what a decoder raises that is no error of ours."""
    with contextlib.suppress(NolocoError, UserError):
        DECODERS[name](raw)
    return True
