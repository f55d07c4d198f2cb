"""The contributions of one pair to a round: what goes out, what comes in, and how the two become one.

What is averaged is z = γ·φ + β·Δ. It travels in one part, z itself, when the round has ended; or in two, φ during
the inner steps and Δ at the end, which are added up where they arrive. `OutgoingUpdate` encodes the own z piece by
piece, `IncomingUpdate` puts the partner's together, `Pull` is what the mean needs of both.

With ẑ for z as the other side reads it, the losses of codecs included, replica i averages to

    mean = z_i + ½(ẑ_j − ẑ_i)                                                          (1)

Its partner computes the same difference with the opposite sign. So the mean of φ over the pair moves by the mean
progress of the two and by nothing else, exactly, whatever the codecs lose: rounding only shows in how far apart the
two remain, which the next meetings shrink as they shrink everything that is between replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from node.model.outer import OuterSettings
from node.model.replica import EVERYTHING, PIECE_PARAMETERS, Replica
from node.model.stage_work import DeviceTransfer, PendingResult
from protocol.codec import Encoded, add_scaled, as_read, encode, require_finite
from protocol.device_codec import packed, unpacked_pieces
from protocol.manifest import Wire
from protocol.messages.training import Part

AT_ONCE = 2**24  # entries worked on at a time on a GPU: 64 MiB
COMPRESSED = "int8"  # kept as it came until the end: a quarter of the memory, and half of the passes over it
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


def weights_of(overlap: str, settings: OuterSettings) -> dict[Part, float]:
    """The parts that a contribution travels in, in this order, and the factor of each in z."""
    if overlap == "phi-early":
        return {"phi": settings.gamma, "progress": settings.beta}
    return {"z": 1.0}


class TensorPool:
    """Flat float32 tensors on the CPU, to be used again: taking fresh memory costs more than filling it.

    Mutable state: those not in use, never more than were in use at once.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A tensor [parameters] with anything in it."""
        return self._free.pop() if self._free else torch.empty(self._parameters)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Only what nothing refers to any more, not even work that was cancelled."""
        self._free.append(tensor)


class IncomingUpdate:
    """Mutable state: ½z as far as it is known, what came compressed, and which pieces of which parts are there.

    Its memory is taken when the first piece comes; it is on the CPU.
    """

    def __init__(self, buffers: TensorPool, weights: Mapping[Part, float], pieces: int) -> None:
        self._buffers = buffers
        self._weights = {part: weight / 2 for part, weight in weights.items()}
        self._summed: dict[Part, set[int]] = {part: set() for part in weights}
        self._compressed: dict[Part, dict[int, Encoded]] = {part: {} for part in weights}
        self._missing = len(weights) * pieces
        self._sum: torch.Tensor | None = None

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def has(self, part: Part, index: int) -> bool:
        return index in self._summed[part] or index in self._compressed[part]

    def add(self, part: Part, index: int, bounds: slice, values: Encoded) -> None:
        """Take in piece `index` of a part, the entries of `bounds`. A piece that is there already changes nothing.

        Product and sum are rounded apart, so that the order in which parts come does not show in z.
        """
        if self.has(part, index):
            return
        self._missing -= 1
        if values.codec == COMPRESSED:
            self._compressed[part][index] = values
            return
        target, read, weight = self.total[bounds], as_read(values).to(torch.float32), self._weights[part]
        if any(index in known for known in self._summed.values()):
            target.add_(read * weight)
        else:
            torch.mul(read, weight, out=target)
        self._summed[part].add(index)

    def read(self, index: int, bounds: slice, target: torch.Tensor) -> None:
        """Piece `index` of ½z into `target`, once all of its parts are there; that may be the piece of `total`."""
        if not any(index in known for known in self._summed.values()):
            target.zero_()
        elif target.data_ptr() != self.total[bounds].data_ptr():
            target.copy_(self.total[bounds])
        for part, weight in self._weights.items():
            if index in self._compressed[part]:
                add_scaled(target, self._compressed[part][index], weight)

    @property
    def total(self) -> torch.Tensor:
        """½z [parameters], without what came compressed."""
        if self._sum is None:
            self._sum = self._buffers.take()
        return self._sum

    def give_back(self) -> None:
        """The round is over, and nobody refers to z."""
        if self._sum is not None:
            self._buffers.give_back(self._sum)
            self._sum = None


class OutgoingUpdate:
    """Mutable state: what was sent with losses, until the round is over."""

    def __init__(
        self, replica: Replica, weights: Mapping[Part, float], wire: Wire, copies: DeviceTransfer
    ) -> None:
        self._replica = replica
        self._copies = copies
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

    def encode_soon(self, part: Part, indices: Sequence[int]) -> PendingResult[list[list[Encoded]]]:
        """As `encode`, of pieces that follow one another. On a GPU all come to the host in one copy."""
        if not self._copies.encodes_there:
            return self._copies.landing(lambda: self.encode(part, indices))
        first = self._replica.piece_bounds(indices[0])
        bounds = slice(first.start, self._replica.piece_bounds(indices[-1]).stop)
        codec, count = self._codecs[part], bounds.stop - bounds.start
        fetch = self._copies.to_host(packed(self._told(part, bounds), codec).raw)

        def arrived() -> list[list[Encoded]]:
            pieces = unpacked_pieces(codec, count, fetch(), first.stop - first.start)
            if codec != LOSSLESS:
                self._sent.update(
                    {(part, index): piece for index, piece in zip(indices, pieces, strict=True)}
                )
            return [[piece, *self._sample(part, index)] for index, piece in zip(indices, pieces, strict=True)]

        return self._copies.landing(arrived)

    def _told(self, part: Part, bounds: slice) -> torch.Tensor:
        """What is encoded: the part, and what of it is owed."""
        values = self._exact(part, bounds)
        if self._feeds_back and part == "progress" and self._codecs[part] != LOSSLESS:
            self._replica.residual.add_to(values, bounds)
        return values

    def _sample(self, part: Part, index: int) -> list[Encoded]:
        """Of φ, beside the first piece of z."""
        if part != "z" or index > 0:
            return []
        return [encode(sampled(self._replica.offered_phi(EVERYTHING)), LOSSLESS)]

    def add_as_sent(self, index: int, bounds: slice, target: torch.Tensor, factor: float) -> None:
        """target ← target + factor·ẑ over one piece, ẑ being the own z as the partner reads it.

        All of it must have been encoded, and the round's weights still be there.
        """
        if target.device.type == "cpu":
            self.add_with_losses(index, target, factor)
        else:
            lost = self.add_with_losses(index, torch.zeros(len(target)), factor)
            target.add_(lost.to(target.device))
        self.add_without_losses(bounds, target, factor)

    def add_with_losses(self, index: int, target: torch.Tensor, factor: float) -> torch.Tensor:
        """The same, on the host, of those parts that a codec has changed. Returns `target`."""
        for part, weight in self._weights.items():
            if (sent := self._sent.get((part, index))) is not None:
                add_scaled(target, sent, factor * weight)
        return target

    def add_without_losses(self, bounds: slice, target: torch.Tensor, factor: float) -> None:
        """The same, on the replica's device, of those parts that arrive as they are, over any bounds."""
        for part, weight in self._weights.items():
            if self._codecs[part] == LOSSLESS:
                target.add_(self._exact(part, bounds), alpha=factor * weight)

    @torch.no_grad()
    def owe_rest(self) -> None:
        """The partner has all of it: what its codec left out of Δ is owed from now on. Call it before the outer step.

        Until then nothing has changed: a round that fails, or is cut off by a restart, owes what it did before.
        """
        residual = self._replica.residual
        self._replica.snapshots.before_change("residual")
        for index, bounds in self.pieces():
            sent = self._sent.get(("progress", index))
            if self._feeds_back and sent is not None:
                meant = self._replica.offered_progress(bounds)
                residual.add_to(meant, bounds)
                residual.keep(meant, as_read(sent).to(meant.device, torch.float32), bounds)

    @torch.no_grad()
    def _encode(self, part: Part, index: int) -> list[Encoded]:
        bounds = self._replica.piece_bounds(index)
        return [self._encode_piece(part, index, bounds), *self._sample(part, index)]

    def _encode_piece(self, part: Part, index: int, bounds: slice) -> Encoded:
        codec, values = self._codecs[part], self._told(part, bounds)
        if codec == LOSSLESS:
            return encode(require_finite(values), codec)
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


class Pull:
    """½(ẑ_j − ẑ_i), a piece at a time, so that it is still in the cache when it is used.

    Mutable state: room for a piece, all pieces once they were asked for, and the sample of those made.
    """

    def __init__(self, offer: OutgoingUpdate, partners: IncomingUpdate, replica: Replica) -> None:
        self._offer = offer
        self._partners = partners
        self._device = replica.device
        self._is_at_once = replica.steps_at_once
        self._room = torch.empty(PIECE_PARAMETERS)
        self._values: torch.Tensor | None = None
        self._stride = sample_stride(partners.total.numel())
        # every n-th value of the pull, filled in as pieces are made
        self.sample = torch.empty_like(sampled(partners.total), device=replica.device)

    @torch.no_grad()
    def piece(self, index: int, bounds: slice) -> torch.Tensor:
        """Piece `index`, the entries of `bounds`, on the device of the own weights; as `whole` was left, if it was.

        Its user may write over it; it lasts until the next one is asked for.
        """
        if self._values is not None:
            return self._values[bounds]
        return self._make(index, bounds, self._room[: bounds.stop - bounds.start])

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        """All of it, [parameters], in the memory of the partner's contribution where that is on the same device.

        What is written to it counts.
        """
        if self._values is None:
            total = self._partners.total
            if self._is_at_once:
                self._values = self._whole_there(total)
            else:
                for index, bounds in self._offer.pieces():
                    self._make(index, bounds, total[bounds])
                self._values = total
        return self._values

    def _whole_there(self, total: torch.Tensor) -> torch.Tensor:
        """On another device: what has losses is put together here and goes there in large copies.

        Memory is taken there first, so that a failure has changed nothing.
        """
        values = torch.zeros_like(total, device=self._device)
        large = [slice(start, start + AT_ONCE) for start in range(0, len(values), AT_ONCE)]
        room = torch.empty(min(AT_ONCE, len(values)), device=self._device)
        for bounds in large:
            self._offer.add_without_losses(bounds, values[bounds], -0.5)
        for index, bounds in self._offer.pieces():
            self._partners.read(index, bounds, total[bounds])
            self._offer.add_with_losses(index, total[bounds], -0.5)
        for bounds in large:
            values[bounds].add_(room[: len(total[bounds])].copy_(total[bounds]))
        self.sample.copy_(sampled(values))
        return values

    def _make(self, index: int, bounds: slice, room: torch.Tensor) -> torch.Tensor:
        """Halves are subtracted: the difference of two finite numbers may not be finite."""
        self._partners.read(index, bounds, room)
        values = room.to(self._device)
        self._offer.add_as_sent(index, bounds, values, -0.5)
        picked, first = values[-bounds.start % self._stride :: self._stride], -(-bounds.start // self._stride)
        self.sample[first : first + len(picked)].copy_(picked)
        return values
