"""Writes the corpus: good examples of whatever is decoded, small ones. Run it again when a format changes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack
import torch

from node.storage.checkpoint_files import Checkpoint
from node.storage.stage_state import StageState
from node.storage.state_directory import StateDirectory
from protocol.access.revocations import Revocations
from protocol.access.tokens import Delegation, Token
from protocol.codecs.codec import encode
from protocol.records.announcement import Announcement, Claim
from protocol.records.records import seal_record
from protocol.run.manifest import as_toml, load_preset
from protocol.run.piece_hashes import TOKENIZER_PIECE_BYTES, PieceHashes
from protocol.run.placement_plan import PlacementPlan
from protocol.run.signed_manifest import SignedManifest, canonical_bytes
from protocol.transport.dht_guard import Serializer
from protocol.transport.hivemind_api import DictionaryDHTValue
from tests.fuzz.decoders import CORPUS, KEY, OWNER, RUN, TOKENIZER
from tests.unit.test_frames import EXAMPLES, sent


def examples() -> Iterator[tuple[str, bytes]]:
    tensors = [
        encode(torch.arange(64.0).view(2, 32), codec) for codec in ("fp32", "fp16", "bf16", "int8", "eden4")
    ]
    for number, message in enumerate(EXAMPLES):
        yield "frame", sent(message, [tensors[number % len(tensors)]] if number % 2 else [])
    manifest = load_preset("tiny")
    said = (
        Announcement(stage=0, state="serving", since=1.7e9, may_serve=[0, 1]),
        Claim(since=1.0, source=0, target=1),
    )
    record = seal_record(OWNER, KEY, said[0].to_bytes(), 2e9, b"credential")
    yield "record", record
    yield from (("announcement", entry.to_bytes()) for entry in said)
    slots = DictionaryDHTValue()
    with slots.freeze():
        slots.store(OWNER.peer_id, msgpack.packb(record), 2e9)
    yield from (("dht-value", Serializer.dumps(value)) for value in (slots, b"plain", None))
    yield "manifest", canonical_bytes(manifest)
    yield "sealed-manifest", SignedManifest.sign(manifest, OWNER).to_bytes()
    yield "toml", as_toml(manifest).encode()
    revoked = Revocations(1.7e9, frozenset({bytes(12), b"x" * 12})).sign(RUN, OWNER)
    yield from (("revocations", raw) for raw in (revoked, msgpack.unpackb(revoked)[0]))
    plan = PlacementPlan.of(RUN, [[OWNER.peer_id], []], 1.7e9, 600).sign(OWNER)
    yield from (("plan", raw) for raw in (plan, msgpack.unpackb(plan)[0]))
    given = Delegation.sign(OWNER, RUN, OWNER.public_key, 2e9)
    for delegation in (None, given):
        token = Token.issue(RUN, OWNER, delegation, 3, 2e9)
        yield "credential", token.credential(OWNER.peer_id)
        yield "token", token.to_text().encode()
    yield "address", f"/ip4/192.0.2.1/tcp/31337/p2p/{OWNER.peer_id}".encode()
    yield "address", f"/ip6/2001:db8::1/tcp/31337/p2p/{OWNER.peer_id}".encode()
    yield "piece-hashes", PieceHashes.sign(bytes(2 * TOKENIZER_PIECE_BYTES + 1), TOKENIZER, OWNER)
    vocabulary = {letter: number for number, letter in enumerate(["<end>", *"abcdefghij"])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    special = {"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False}
    added = [{**special, "normalized": False, "special": True}]
    yield "tokenizer", json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()
    yield "checkpoint", _checkpoint()


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        state = StageState(1, 1, 0, 1, *(torch.arange(8.0) for _ in range(5)))
        StateDirectory(Path(folder)).save_checkpoint(RUN, Checkpoint(0, state))
        return (Path(folder) / "checkpoint-0.safetensors").read_bytes()


if __name__ == "__main__":
    for number, (name, raw) in enumerate(examples()):
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        (CORPUS / name / f"{number:02d}.bin").write_bytes(raw)
