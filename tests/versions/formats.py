"""What travels and what is kept, in a form in which two versions can be compared."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
from pydantic import BaseModel

from node.giving.ledger import ContributionLedger
from node.storage.checkpoint_files import CHECKPOINT_FORMAT, FACTS, LINEAGE_FACTS, TENSORS
from node.storage.state_directory import WRITTEN
from protocol.access.revocations import revoked_key
from protocol.access.tokens import SERIAL_BYTES, Invitation, Token
from protocol.files.keeping import FORMAT
from protocol.messages import Message, peers, state, training  # noqa: F401  (they make the messages known)
from protocol.records.announcement import (
    Announcement,
    Claim,
    bucket_key,
    joining_key,
    moving_key,
    record_key,
    stage_key,
)
from protocol.records.identity import Identity
from protocol.records.receipts import signed_receipt
from protocol.rpc.compatibility import FEATURES, LINE_BYTES, UNTOLD, VERSION_PROTOCOL
from protocol.run.manifest import Manifest
from protocol.run.placement_plan import PlacementPlan, plan_key
from protocol.run.signed_manifest import SignedManifest
from protocol.version import MINOR, PROTOCOL
from tests.fuzz.decoders import OWNER, RUN
from tests.fuzz.make_corpus import examples
from tests.unit.test_frames import read

VERSIONS = Path(__file__).parent
FORMATS = "formats.json"
FIXED = {
    "record",
    "announcement",
    "dht-value",
    "revocations",
    "plan",
    "piece-hashes",
    "checkpoint",
}  # of the fuzzers' corpus
FOR_PEOPLE = ("title", "description")


def formats() -> dict[str, Any]:
    """The formats of this version: messages, records and manifests as JSON schemas, and what is kept on disk."""
    models = {message.kind: message for message in messages()}
    entries: Iterable[type[BaseModel]] = (Announcement, Claim, PlacementPlan, Manifest)
    return {
        "protocol": f"{PROTOCOL}.{MINOR}",
        "features": list(FEATURES),
        "untold": list(UNTOLD),
        "version stream": f"{LINE_BYTES} bytes of {VERSION_PROTOCOL}",
        "DHT keys": _keys(),
        "bytes": {name: hashlib.sha256(raw).hexdigest()[:16] for name, raw in _written()},
        "messages": {kind: _schema(models[kind]) for kind in sorted(models)},
        "signed": {entry.__name__: _schema(entry) for entry in entries},
        "directory": {"format": FORMAT, "files": sorted(WRITTEN)},
        "checkpoint": {
            "format": CHECKPOINT_FORMAT,
            "facts": sorted(FACTS | LINEAGE_FACTS),
            "tensors": list(TENSORS),
        },
    }


def _keys() -> list[str]:
    """The keys of everything that is under one in the DHT."""
    keys = [stage_key(RUN, 1), bucket_key(RUN, 1, 4, 3), joining_key(RUN), moving_key(RUN)]
    return [*keys, revoked_key(RUN), plan_key(RUN), record_key(RUN, 1, OWNER.peer_id, 4)]


def _written() -> Iterator[tuple[str, bytes]]:
    """What this version writes of fixed contents: frames, and all that is sealed, signed or kept on disk."""
    numbers = Counter[str]()
    for kind, raw in examples():
        if kind == "frame":
            yield f"frame of {read(raw, 1 << 16).kind}", raw
        elif kind in FIXED:
            yield f"{kind} {numbers[kind]}", raw
            numbers[kind] += 1
    micro = SignedManifest.from_bytes((VERSIONS / "69c8df8" / "node-1" / "manifest.noloco").read_bytes())
    yield "manifest", SignedManifest.sign(micro.manifest, OWNER).to_bytes()
    seed = bytes(32)
    plain = Invitation(bytes(SERIAL_BYTES), Identity(seed).public_key, 3, 2e9)
    token = Token(RUN, replace(plain, signature=OWNER.sign(plain.signed(RUN))), Identity(seed), seed)
    yield "token", token.to_text().encode()
    yield "credential", token.credential(OWNER.peer_id)
    receipt = signed_receipt(RUN, Identity(seed).peer_id, OWNER.peer_id, (10, 2), "me", OWNER.sign)
    yield "receipt", msgpack.packb(list(receipt))
    yield "ledger", ContributionLedger().as_json().encode()


def messages(base: type[Message] = Message) -> list[type[Message]]:
    """All messages that have a name on the wire."""
    found = [base] if "kind" in base.__dict__ else []
    return found + [message for below in base.__subclasses__() for message in messages(below)]


def kept_formats() -> dict[str, Any]:
    """The formats of the last version of which an example is kept, by protocol and minor."""
    return dict(json.loads((VERSIONS / last_kept() / FORMATS).read_text(encoding="utf-8")))


def last_kept() -> str:
    found = [path.parent.name for path in VERSIONS.glob(f"*/{FORMATS}")]
    return max(found, key=lambda name: tuple(map(int, name.split("."))))


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """The places in which two formats differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        inner = sorted(before.keys() | now.keys())
        return [
            found
            for key in inner
            for found in differences(before.get(key), now.get(key), f"{place}.{key}" if place else key)
        ]
    return [] if before == now else [place]


def _schema(model: type[BaseModel]) -> Any:
    return _bare(model.model_json_schema())


def _bare(schema: Any) -> Any:
    """A schema without the words that are for people; a property may have one of their names."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(one) for name, one in inner.items()} if key == "properties" else _bare(inner)
        for key, inner in schema.items()
        if key not in FOR_PEOPLE
    }
