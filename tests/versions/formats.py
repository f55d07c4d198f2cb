"""What travels and what is kept, in a form in which two versions can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from node.storage.checkpoint_files import CHECKPOINT_FORMAT, FACTS, LINEAGE_FACTS, TENSORS
from node.storage.state_directory import WRITTEN
from protocol.announcement import Announcement, Claim
from protocol.compatibility import FEATURES, MINOR, PROTOCOL
from protocol.keeping import FORMAT
from protocol.manifest import Manifest
from protocol.messages import Message, peers, training  # noqa: F401  (they make the messages known)
from protocol.placement_plan import PlacementPlan

VERSIONS = Path(__file__).parent
FORMATS = "formats.json"
FOR_PEOPLE = ("title", "description")


def formats() -> dict[str, Any]:
    """The formats of this version: messages, records and manifests as JSON schemas, and what is kept on disk."""
    models = {message.kind: message for message in messages()}
    entries: Iterable[type[BaseModel]] = (Announcement, Claim, PlacementPlan, Manifest)
    return {
        "protocol": f"{PROTOCOL}.{MINOR}",
        "features": list(FEATURES),
        "messages": {kind: _schema(models[kind]) for kind in sorted(models)},
        "signed": {entry.__name__: _schema(entry) for entry in entries},
        "directory": {"format": FORMAT, "files": sorted(WRITTEN)},
        "checkpoint": {
            "format": CHECKPOINT_FORMAT,
            "facts": sorted(FACTS | LINEAGE_FACTS),
            "tensors": list(TENSORS),
        },
    }


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
