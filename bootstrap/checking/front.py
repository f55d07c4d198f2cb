"""The results of the study "Bytes against loss" of docs/notebook/learning.md, kept so that others can cite them.

`benchmarks/front.py` runs the study and writes front.json.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from protocol.run.manifest import Manifest

FURTHEST = 2.0  # of `_distance`: nothing is cited for a setting further from all that were tried
USUAL_RATE = 2e-3  # the preset's learning rate
WORTH_SAYING = 0.02  # nats: smaller differences are within the noise of seeds


@dataclass(frozen=True)
class FrontPoint:
    """A setting that was tried, and what came of it, over its seeds."""

    method: str
    k: int
    alpha: float
    beta: float
    gamma: float
    overlap: str
    gossip: str
    progress: str
    error_feedback: bool
    learning_rate: float
    seeds: int
    loss: float  # nats per token
    spread: float
    bytes_per_token: float
    share: float  # of the bytes of all-reduce in every step

    @property
    def name(self) -> str:
        """Method, k, coefficients and codecs, as far as they matter."""
        parts = ["all-reduce in every step"] if self.method == "all-reduce" else [self.method, f"k={self.k}"]
        if self.method in ("noloco", "diloco"):
            parts.append(f"α={self.alpha:g} β={self.beta:g} γ={self.gamma:g}")
        if self.learning_rate != USUAL_RATE:
            parts.append(f"lr={self.learning_rate:g}")
        if self.overlap != "none":
            parts.append(self.overlap)
        if self.gossip != "fp32":
            parts.append(f"z {self.gossip}")
        if self.overlap == "phi-early" and self.progress != "fp32":
            parts.append(f"Δ {self.progress}" + (" with error feedback" if self.error_feedback else ""))
        return " ".join(parts)


@cache
def read_points() -> tuple[FrontPoint, ...]:
    known: list[dict[str, Any]] = json.loads((files(__package__) / "front.json").read_text(encoding="utf-8"))
    return tuple(FrontPoint(**point) for point in known)


def citation(manifest: Manifest) -> str | None:
    """Cite what the study found for settings like these, and what did better with no more bytes.

    None when the manifest is far from every setting that was tried.
    """
    points = read_points()
    reference = next(point for point in points if point.method == "all-reduce")
    like = min(points, key=lambda point: _distance(point, manifest))
    if _distance(like, manifest) > FURTHEST:
        return None

    def described(point: FrontPoint) -> str:
        return f"{point.name}: {point.loss - reference.loss:+.2f} nats for {point.share:.1%} of the bytes"

    found = f"against all-reduce in every step, {described(like)}"
    better = min(
        (point for point in points if point.share <= max(like.share, 0.001) * 1.05),
        key=lambda point: point.loss,
    )
    if better.loss < like.loss - WORTH_SAYING:
        found += f"; the best with no more bytes was {described(better)}"
    return f"{found} (1,000 steps of a small model with AdamW, docs/learning.md; with Muon or more steps it differs)."


def _distance(point: FrontPoint, manifest: Manifest) -> float:
    """The distance: 0 for the same outer settings; 1 for twice the k, or for coefficients that are 0.5 apart."""
    outer, wire = manifest.outer, manifest.wire
    kinds = ("noloco", "average")
    if point.method != outer.method and not (point.method in kinds and outer.method in kinds):
        return math.inf
    if outer.method == "local":
        return 0.0
    own = (0.0, 1.0, 1.0) if point.method == "average" else (point.alpha, point.beta, point.gamma)
    coefficients = sum(abs(one - other) for one, other in zip(own, outer.coefficients, strict=True))
    differs = (point.overlap != outer.overlap) + (point.gossip != wire.gossip)
    return abs(math.log2(point.k / outer.inner_steps)) + 2 * coefficients + 0.25 * differs
