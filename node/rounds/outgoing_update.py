"""What this replica gives to one partner: its contribution, encoded piece by piece. Used by the compute thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from node.model.replica import EVERYTHING, Replica
from protocol.codec import Encoded, add_scaled, as_read, encode, require_finite
from protocol.manifest import Wire
from protocol.messages import Part

LOSSLESS = "fp32"
# Of φ, for the distance to the partner: with 2^14 entries its error is half a percent, with 2^10 two; of small stages
# no more than a 64th goes, so that the sample does not outweigh a contribution in int8.
SAMPLED_PARAMETERS = 2**14
LEAST_SAMPLED = 2**10
SAMPLED_PART = 64


def sample_stride(parameters: int) -> int:
    """Every how many-th entry of φ is in the sample."""
    sampled = min(SAMPLED_PARAMETERS, max(LEAST_SAMPLED, parameters // SAMPLED_PART))
    return max(1, parameters // sampled)


def sampled(values: torch.Tensor) -> torch.Tensor:
    """The sample of a tensor [parameters]; a view."""
    return values[:: sample_stride(values.numel())]


class OutgoingUpdate:
    """Mutable state: what was sent with losses, until the round is over."""

    def __init__(self, replica: Replica, weights: Mapping[Part, float], wire: Wire) -> None:
        self._replica = replica
        self._weights = weights
        self._codecs: dict[Part, str] = {"z": wire.gossip, "phi": wire.gossip, "progress": wire.progress}
        self._feeds_back = wire.error_feedback
        self._sent: dict[tuple[Part, int], Encoded] = {}

    def pieces(self) -> Iterator[tuple[int, slice]]:
        for index in range(self._replica.pieces):
            yield index, self._replica.piece_bounds(index)

    def encode(self, part: Part, indices: Sequence[int]) -> list[list[Encoded]]:
        """The tensors of the messages that carry these pieces.

        They may share memory with φ: send them before the outer step. Raises `CodecError` when the codec cannot
        carry the values.
        """
        return [self._encode(part, index) for index in indices]

    def add_as_sent(self, index: int, bounds: slice, target: torch.Tensor, factor: float) -> None:
        """target ← target + factor·ẑ over one piece, ẑ being the own z as the partner reads it.

        All of it must have been encoded, and the round's weights still be there.
        """
        for part, weight in self._weights.items():
            sent = self._sent.get((part, index))
            if sent is None:
                target.add_(self._exact(part, bounds), alpha=factor * weight)
            elif target.device.type == "cpu":
                add_scaled(target, sent, factor * weight)
            else:
                target.add_(as_read(sent).to(target.device, torch.float32), alpha=factor * weight)

    @torch.no_grad()
    def owe_rest(self) -> None:
        """The partner has all of it: what its codec left out of Δ is owed from now on. Call it before the outer step.

        Until then nothing has changed: a round that fails, or is cut off by a restart, owes what it did before.
        """
        residual = self._replica.residual
        for index, bounds in self.pieces():
            sent = self._sent.get(("progress", index))
            if self._feeds_back and sent is not None:
                meant = self._replica.offered_progress(bounds)
                residual.add_to(meant, bounds)
                residual.keep(meant, as_read(sent).to(meant.device, torch.float32), bounds)

    @torch.no_grad()
    def _encode(self, part: Part, index: int) -> list[Encoded]:
        bounds = self._replica.piece_bounds(index)
        encoded = self._encode_piece(part, index, bounds)
        if part == "z" and index == 0:
            return [encoded, encode(sampled(self._replica.offered_phi(EVERYTHING)), LOSSLESS)]
        return [encoded]

    def _encode_piece(self, part: Part, index: int, bounds: slice) -> Encoded:
        codec, values = self._codecs[part], self._exact(part, bounds)
        if codec == LOSSLESS:
            return encode(require_finite(values), codec)
        if self._feeds_back and part == "progress":
            self._replica.residual.add_to(values, bounds)
        encoded = self._sent[part, index] = encode(values, codec)
        if codec != "int8":  # it has refused NaN and infinity already
            require_finite(as_read(encoded))
        return encoded

    def _exact(self, part: Part, bounds: slice) -> torch.Tensor:
        if part == "phi":
            return self._replica.offered_phi(bounds)
        if part == "progress":
            return self._replica.offered_progress(bounds)
        return self._replica.contribution(bounds)
