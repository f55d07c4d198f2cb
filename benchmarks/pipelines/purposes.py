"""What a frame is sent for, in the words of a simulated swarm's report: to compare it with daemons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from bootstrap.lab.simulated_swarm.modelled_network import FRAME, MESSAGE
from node.model.stage import parameter_count
from node.rounds.contribution import sample_stride
from node.watch.trace import Trace
from protocol.codecs.codec import nbytes_of
from protocol.ground import PeerId
from protocol.rpc.frames import FrameWatch
from protocol.run.manifest import Manifest

SMALL = ("pairing", "questions")  # a handful of bytes each: these are counted
PURPOSES = ("activations", "gradients", "rounds", *SMALL)
_OF_KIND = {
    "pipeline: forward": "activations",
    "pipeline: gradient": "gradients",
    "gossip: contribute": "rounds",
    "control: get-backlog": "questions",
    "control: backlog": "questions",
}


def purpose_of(frame: str) -> str:
    """By its class of traffic and its kind, as a trace names them; empty for others."""
    return "pairing" if frame.startswith("pairing: ") else _OF_KIND.get(frame, "")


def modelled(sent: Mapping[str, float]) -> dict[str, float]:
    """Of the bytes of simulated peers: small messages counted instead."""
    return {
        purpose: sent.get(purpose, 0.0) / (MESSAGE + FRAME if purpose in SMALL else 1) for purpose in PURPOSES
    }


def activation_bytes(manifest: Manifest) -> int:
    """Of a microbatch, without its labels."""
    shape = (manifest.inner.sequences, manifest.data.sequence_tokens, manifest.model.hidden_size)
    return nbytes_of(manifest.wire.activations, shape)


def contribution_bytes(manifest: Manifest) -> int:
    """Of a replica of the first stage in a round, without overlap, and of the sample beside it."""
    parameters = parameter_count(manifest, 0)
    return nbytes_of(manifest.wire.gossip, (parameters,)) + 4 * (parameters // sample_stride(parameters))


class SentFrames(Trace, FrameWatch):
    """Mutable state: bytes of all nodes that were given this trace, by purpose; of small messages how many."""

    def __init__(self) -> None:
        self.sums = Counter[str]()

    def frames(self) -> FrameWatch:
        return self

    def sent(self, traffic: str, peer: PeerId, kind: str, nbytes: int, began: float) -> None:
        purpose = purpose_of(f"{traffic}: {kind}")
        if purpose:
            self.sums[purpose] += 1 if purpose in SMALL else nbytes
