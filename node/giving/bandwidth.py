"""The part of a node's capacity that its volunteer's bandwidth limits leave. Pure."""

from __future__ import annotations

import math

from node.config import NodeConfig
from node.machine.limits import parse_rate
from protocol.codecs.codec import nbytes_of
from protocol.run.manifest import Manifest


def most_by_bandwidth(config: NodeConfig, manifest: Manifest, stage: int) -> float:
    """Microbatches per second through `stage` within the limits; infinity without any.

    Of its bytes, activations go onward and gradients back: what a node sends of the one it receives of the other.
    What averaging takes besides is left out, since it comes once a round.
    """
    inner, data, wire = manifest.inner, manifest.data, manifest.wire
    shape = (inner.sequences, data.sequence_tokens, manifest.model.hidden_size)
    activations, gradients = nbytes_of(wire.activations, shape), nbytes_of(wire.gradients, shape)
    before, after = stage > 0 or manifest.is_ring, stage < manifest.stages - 1 or manifest.is_ring
    sent, received = after * activations + before * gradients, before * activations + after * gradients
    limits = ((config.max_upload, sent), (config.max_download, received))
    return min((parse_rate(rate) / nbytes for rate, nbytes in limits if rate and nbytes), default=math.inf)
