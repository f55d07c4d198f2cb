"""How large a frame of each class of traffic a run can need."""

from __future__ import annotations

from node.model.replica import PIECE_PARAMETERS
from protocol.manifest import Manifest
from protocol.rpc import Traffic


def payload_limits(manifest: Manifest) -> dict[Traffic, int]:
    """The largest frame of each class that this run can need, with some room for headers and scales."""
    activations = manifest.tokens_per_microbatch * (manifest.model.hidden_size * 4 + 8)
    logits = manifest.model.vocab_size * 8  # of one token, beside the tokens that they are of
    piece = PIECE_PARAMETERS * 4
    return {
        Traffic.CONTROL: 1024 * 1024,
        Traffic.PIPELINE: max(activations, logits) + 64 * 1024,
        Traffic.PAIRING: 64 * 1024,
        Traffic.GOSSIP: 2 * piece + 64 * 1024,
        Traffic.STATE: 4 * piece + 64 * 1024,
    }
