"""The tiny preset with the averaging of NoLoCo's paper, and with AdamW, as for most tables in docs."""

from __future__ import annotations

from protocol.run.manifest import Manifest, load_preset

PUBLISHED = {"alpha": 0.5, "beta": 0.7, "gamma": 0.7, "inner_steps": 25}


def tiny_as_published() -> Manifest:
    """With Muon, in float32."""
    tiny = load_preset("tiny")
    outer = tiny.outer.model_copy(update=PUBLISHED)
    wire = tiny.wire.model_copy(update={"gossip": "fp32"})
    return tiny.model_copy(update={"outer": outer, "wire": wire})


def tiny_with_adamw() -> Manifest:
    tiny = tiny_as_published()
    inner = tiny.inner.model_copy(update={"optimizer": "adamw", "muon_learning_rate": None})
    return tiny.model_copy(update={"inner": inner})
