"""Sequences longer than the positions that a model was made for: allowed, and told to whoever founds a run."""

from __future__ import annotations

from protocol.run.manifest import Manifest


def longer_than_positions(manifest: Manifest) -> str:
    """A sentence with what to do; empty where all positions of a sequence are the model's."""
    tokens, positions = manifest.data.sequence_tokens, manifest.model.max_positions
    if not positions or tokens <= positions:
        return ""
    return (
        f"Sequences have {tokens:,} tokens (data.sequence_tokens), and the model has {positions:,} positions "
        "(model.max_positions; max_position_embeddings of a checkpoint): what comes after those it never saw, and "
        f"an export will still say {positions:,}. Set data.sequence_tokens to {positions:,} or less in a manifest of "
        "your own, unless longer ones are meant."
    )
