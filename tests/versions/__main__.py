"""python -m tests.versions: keep an example of all that this version sends, signs and writes to disk.

Run it when a format has changed and `MINOR` in protocol/version.py was counted up; commit what it writes. Two
nodes train a micro model for some seconds, and what they leave behind is kept, with keys that nothing else uses.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgpack

from protocol.records.announcement import Announcement
from protocol.run.manifest import as_toml
from protocol.run.signed_manifest import SignedManifest
from tests.fuzz.make_corpus import examples
from tests.real.daemons import NodeDaemon, SeedDaemon
from tests.versions.formats import FORMATS, VERSIONS, formats

KEPT = "kept.msgpack"
NOT_KEPT = {
    "tokenizer",
    "checkpoint",
    "dht-value",
    "toml",
    "address",
}  # of the corpus: other formats than ours
LEFT_OUT = shutil.ignore_patterns("documents", "*.log", "events.jsonl", "lock", "copies")
MICRO = VERSIONS / "69c8df8" / "node-1" / "manifest.noloco"


def keep_signed(folder: Path) -> None:
    """Keep frames, records, manifests, plans, tokens and revocations."""
    kept: dict[str, list[bytes]] = {}
    for kind, raw in examples():
        if kind not in NOT_KEPT:
            kept.setdefault(kind, []).append(raw)
    kept["announcement"].append(Announcement(stage=1, state="finished", since=1.7e9).to_bytes())
    (folder / KEPT).write_bytes(msgpack.packb(kept))
    text = json.dumps(formats(), indent=1, sort_keys=True)
    (folder / FORMATS).write_text(text + "\n", encoding="utf-8")


def keep_directories(folder: Path) -> None:
    """Keep the state directories of two nodes that have trained together, and their run's."""
    manifest = SignedManifest.from_bytes(MICRO.read_bytes()).manifest
    with tempfile.TemporaryDirectory() as place:
        trained = Path(place)
        (trained / "micro.toml").write_text(as_toml(manifest), encoding="utf-8")
        seed = SeedDaemon(trained / "run", "--manifest", str(trained / "micro.toml"))
        nodes = [
            NodeDaemon(trained / f"node-{stage}", "--join", seed.join_address(), "--stage", str(stage))
            for stage in range(manifest.stages)
        ]
        for node in nodes:
            node.wait_for_step(12)
        for daemon in (*nodes, seed):
            daemon.signal(signal.SIGINT)
            daemon.process.wait(60)
        for name in ("run", "node-0", "node-1"):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(trained / name, folder / name, ignore=LEFT_OUT)


def main() -> int:
    folder = VERSIONS / str(formats()["protocol"])
    folder.mkdir(exist_ok=True)
    keep_signed(folder)
    keep_directories(folder)
    print(f"Kept in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
