"""What this replica gives to one partner: its contribution, encoded piece by piece. Used by the compute thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from node.contribution import Contribution
from node.replica import EVERYTHING, Replica
from protocol.codec import Encoded, as_read, encode, require_finite
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


class Offer:
    """Mutable state: `own`, the contribution as the partner reads it, and pieces that were encoded ahead."""

    def __init__(self, replica: Replica, own: Contribution, wire: Wire) -> None:
        self.own = own
        self._replica = replica
        self._codecs: dict[Part, str] = {"z": wire.gossip, "phi": wire.gossip, "progress": wire.progress}
        self._ahead: dict[tuple[Part, int], list[Encoded]] = {}

    def encode(self, part: Part, indices: Sequence[int]) -> list[list[Encoded]]:
        """The tensors of the messages that carry these pieces.

        They may share memory with φ and with `own`: send them before the outer step. Raises `CodecError` when
        the codec cannot carry the values.
        """
        return [
            self._ahead.pop((part, index)) if (part, index) in self._ahead else self._encode(part, index)
            for index in indices
        ]

    def encode_ahead(self, part: Part) -> None:
        """All pieces of a part now, since the weights go on changing while they are sent."""
        for index in range(self._replica.pieces):
            self._ahead[part, index] = self._encode(part, index)

    def complete(self) -> torch.Tensor:
        """The own z: as it was sent as far as it was, exact elsewhere."""
        for part in self.own.parts:
            for index in range(self._replica.pieces):
                if not self.own.has(part, index):
                    bounds = self._replica.piece_bounds(index)
                    self.own.add(part, index, bounds, self._exact(part, bounds))
        return self.own.z

    @torch.no_grad()
    def _encode(self, part: Part, index: int) -> list[Encoded]:
        bounds = self._replica.piece_bounds(index)
        values = self._exact(part, bounds)
        encoded = self._record(part, index, bounds, values)
        if part == "z" and index == 0:
            sample = self._replica.offered_phi(EVERYTHING)[:: sample_stride(self._replica.parameters)]
            return [encoded, encode(sample, LOSSLESS)]
        return [encoded]

    def _record(self, part: Part, index: int, bounds: slice, values: torch.Tensor) -> Encoded:
        """Encode a piece, and take into `own` what the partner will read."""
        codec = self._codecs[part]
        if codec == LOSSLESS:
            self.own.add(part, index, bounds, values)
            return encode(self.own.z[bounds] if part == "z" else values, codec)
        if part == "progress":
            self._replica.residual.add_to(values, bounds)
        encoded = encode(values, codec)
        read = as_read(encoded).to(values.device, torch.float32)
        if codec != "int8":  # it has refused NaN and infinity already
            require_finite(read)
        self.own.add(part, index, bounds, read)
        if part == "progress":
            self._replica.residual.keep(values, read, bounds)
        return encoded

    def _exact(self, part: Part, bounds: slice) -> torch.Tensor:
        if part == "phi":
            return self._replica.offered_phi(bounds)
        if part == "progress":
            return self._replica.offered_progress(bounds)
        return self._replica.contribution(bounds)
