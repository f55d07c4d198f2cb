"""Estimates the memory that a stage takes, by formula: before anything is allocated, and for a founder's report.

What is exactly known (weights, momenta, buffers, messages) is counted here for good; what activations take is
measured at the start of a node (dry_run.py), and the formula only tells what is worth trying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from node.model.flat import layout
from node.model.head_loss import logits_bytes, padded
from node.model.muon import muon_workspace
from node.model.stage import parameter_count, parameter_shapes
from protocol.codecs.codec import nbytes_of
from protocol.codecs.near_codecs import BITS
from protocol.run.manifest import Manifest

Precision = Literal["fp32", "bf16"]

# float32 on the device: θ, gradients, φ, δ and AdamW's two moments, of which Muon leaves the second one unused
TRAINED_COPIES = 6
# a checkpoint is copied before it is written: θ, φ, δ and the moments; error feedback adds one
SAVED_COPIES = 5
QUEUE_BATCHES = 2  # microbatches that may wait for a place in a step, in batches of an inner step
REMEMBERED_BATCHES = 4  # of answers, for repeated deliveries
LABEL_BYTES = 4  # an int32 travels with each token's activations, for the loss at the end
STREAMS = 64 * 2**20  # frames on their way, and what p2pd takes for more peers than at the start


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes of one microbatch: `kept` between its forward and its backward pass, `peak` while it is computed."""

    kept: int
    peak: int

    def of(self, in_flight: int) -> int:
        """Bytes of so many microbatches in flight, one of which is computed."""
        return (in_flight - 1) * self.kept + self.peak


@dataclass(frozen=True)
class BufferBytes:
    """Bytes that are needed beside what training a microbatch takes."""

    averaging: int
    checkpoint: int
    messages: int

    @property
    def total(self) -> int:
        return self.averaging + self.checkpoint + self.messages


def memory_of_state(manifest: Manifest, stage: int, precision: Precision = "fp32") -> int:
    """Bytes of weights, gradients, slow weights and momenta, of the bf16 copies of what is multiplied, and of what an
    inner step with Muon works with.
    """
    shapes = parameter_shapes(manifest, stage)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    working = 0 if precision == "fp32" else 2 * _multiplied(manifest, stage)
    return parameters * 4 * TRAINED_COPIES + working + muon_workspace(manifest.inner, layout(shapes))


def _multiplied(manifest: Manifest, stage: int) -> int:
    """Entries of the layers' matrices and of the head, padded."""
    shapes = parameter_shapes(manifest, stage)
    layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) > 1)
    head = padded(manifest.model.vocab_size) * manifest.model.hidden_size
    return layers + (head if stage == manifest.head_stage else 0)


def memory_of_buffers(manifest: Manifest, stage: int) -> BufferBytes:
    """Bytes that rounds, checkpoints and peers may take at the same time; on the host, whatever the device."""
    parameters = parameter_count(manifest, stage)
    return BufferBytes(
        averaging=_averaging(manifest, parameters),
        checkpoint=parameters * 4 * SAVED_COPIES,
        messages=_messages(manifest, stage),
    )


def _averaging(manifest: Manifest, parameters: int) -> int:
    outer, wire, whole = manifest.outer, manifest.wire, parameters * 4
    if outer.method == "local":
        return 0
    if outer.method == "diloco":
        return 4 * whole  # z, the mean, and the parts that this replica gathers
    # what is modulo a few bits begins in int8
    gossip = "int8" if wire.gossip in BITS else wire.gossip
    parts = (gossip, wire.progress) if outer.overlap == "phi-early" else (gossip,)
    encoded = sum(nbytes_of(codec, [parameters]) for codec in parts if codec != "fp32")
    compressed = sum(nbytes_of(codec, [parameters]) for codec in parts if codec == "int8")
    partners = whole + compressed
    ahead = 0 if outer.overlap == "none" else partners  # the next round's pair is agreed already
    return partners + ahead + encoded


def _messages(manifest: Manifest, stage: int) -> int:
    """Microbatches that wait here, in the batch and in the queue, and the answers that are remembered."""
    if stage == 0 and not manifest.is_ring:  # nobody sends any to it
        return STREAMS
    batch = manifest.inner.microbatches
    received = (1 + QUEUE_BATCHES) * batch * forward_bytes(manifest)
    return STREAMS + received + REMEMBERED_BATCHES * batch * backward_bytes(manifest)


def forward_bytes(manifest: Manifest) -> int:
    """Bytes of a microbatch on its way to the next stage: activations and labels."""
    return (
        nbytes_of(manifest.wire.activations, _boundary(manifest))
        + manifest.tokens_per_microbatch * LABEL_BYTES
    )


def backward_bytes(manifest: Manifest) -> int:
    """Bytes of its gradient on the way back."""
    return nbytes_of(manifest.wire.gradients, _boundary(manifest))


def _boundary(manifest: Manifest) -> tuple[int, int, int]:
    return manifest.inner.sequences, manifest.data.sequence_tokens, manifest.model.hidden_size


def most_in_flight(manifest: Manifest, stage: int) -> int:
    """Microbatches that may be between their forward and backward passes: the last hop's stage runs both at once."""
    if stage == manifest.hops - 1:
        return 1
    return manifest.inner.microbatches * (1 + manifest.inner.staleness)


def least_in_flight(manifest: Manifest, stage: int) -> int:
    """Microbatches that keep all stages busy: one in each from here on, and one on each way between them."""
    return min(most_in_flight(manifest, stage), 2 * (manifest.hops - 1 - stage) + 1)


def sliced(manifest: Manifest, stage: int, slice_peak: int) -> MicrobatchBytes:
    """A microbatch in slices, of which one at a time takes `slice_peak`.

    Of a microbatch that went on to the next stage only the inputs are kept: its slices run forward once more.
    Beside a slice there are the microbatch's outputs or its gradient, and the gradient by its inputs; in a ring the
    head's slices have as much beside them.
    """
    whole = 4 * math.prod(_boundary(manifest))  # of its activations at one end of the stage, float32
    if stage == manifest.hops - 1:
        return MicrobatchBytes(0, 2 * whole + slice_peak)
    kept = whole + forward_bytes(manifest)
    return MicrobatchBytes(kept, kept + 2 * whole + slice_peak)


def estimated(
    manifest: Manifest, stage: int, sequences: int, recomputes: bool, precision: Precision = "fp32"
) -> MicrobatchBytes:
    """So many sequences computed as one. Counted from what autograd saves of a Llama's layer in torch 2.13:

    per token 32·hidden + 8·hidden·(key-value heads / heads) + 16·intermediate bytes in float32; in bf16 about 30, 4
    and 8. A layer's backward pass takes about as much again, what lies unused between tensors as much, and the
    largest weight's gradient. The head has those of a chunk's logits, and its gradient by its inputs.
    """
    model, layers = manifest.model, len(manifest.layers_of(stage))
    tokens, hidden = sequences * manifest.data.sequence_tokens, model.hidden_size
    shared = hidden * model.key_value_heads / model.heads
    per_token = (
        32 * hidden + 8 * shared + 16 * model.intermediate_size
        if precision == "fp32"
        else 30 * hidden + 4 * shared + 8 * model.intermediate_size
    )
    layer = int(tokens * per_token)
    ends = tokens * hidden * 4 * 2
    graph = layers * (tokens * hidden * 4 if recomputes else layer) + ends
    largest = max(math.prod(shape) for shape in parameter_shapes(manifest, stage).values()) * 4
    peak = graph + layer * (3 if recomputes else 2) + largest + ends
    logits = logits_bytes(tokens, model.vocab_size, precision) + tokens * hidden * 4
    if stage == manifest.hops - 1:
        return MicrobatchBytes(0, max(peak, graph + logits + largest + ends))
    if stage == manifest.head_stage:  # in a ring: of a microbatch that comes back while its graph is kept
        peak = max(peak, graph + logits + largest + ends)
    return MicrobatchBytes(graph, peak)
