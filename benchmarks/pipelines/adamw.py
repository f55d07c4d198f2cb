"""The tiny preset with AdamW: what the tables in docs were measured with."""

from __future__ import annotations

from protocol.manifest import Manifest, load_preset


def tiny_with_adamw() -> Manifest:
    tiny = load_preset("tiny")
    inner = tiny.inner.model_copy(update={"optimizer": "adamw", "muon_learning_rate": None})
    return tiny.model_copy(update={"inner": inner})
