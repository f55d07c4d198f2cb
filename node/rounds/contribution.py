"""The contributions of one pair to a round: what goes out, what comes in, and how the two become one.

What is averaged is z = γ·φ + β·Δ. It travels in one part, z itself, when the round has ended; or in two, φ during
the inner steps and Δ at the end, which are added up where they arrive. `OutgoingUpdate` encodes the own z piece by
piece, `IncomingUpdate` puts the partner's together; `node.rounds.pull` has what the mean needs of both.

With ẑ for z as the other side reads it, the losses of codecs included, replica i averages to

    mean = z_i + ½(ẑ_j − ẑ_i)                                                          (1)

Its partner computes the same difference with the opposite sign. So the mean of φ over the pair moves by the mean
progress of the two and by nothing else, exactly, whatever the codecs lose: rounding only shows in how far apart the
two remain, which the next meetings shrink as they shrink everything that is between replicas.

Modulo a few bits (`codecs.lattice`) z can be read by a near partner alone. What either of the two could not read
both leave as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from node.model.fragment import EVERYTHING, Fragment
from node.model.outer import OuterSettings
from node.model.transfer import Deferred, DeviceTransfer, Here, Pending
from node.rounds.nearness import Nearness
from protocol.codecs.codec import Encoded, add_scaled, as_read, encode, require_finite
from protocol.codecs.device_codec import packed, unpacked_pieces
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import distance_of
from protocol.codecs.near_codecs import BITS
from protocol.codecs.nearby import as_sent, encode_near, read_beside, rounding_of, seed_of
from protocol.messages.training import Part
from protocol.run.manifest import Wire

COMPRESSED = "int8"  # kept as it came until the end: a quarter of the memory, and half of the passes over it
LOSSLESS = "fp32"
# Of φ, for the distance to the partner: with 2^14 entries its error is half a percent, with 2^9 three; of small
# stages no more than a 256th goes, so that the sample is an eighth of a bit beside contributions of two or three.
SAMPLED_PARAMETERS = 2**14
LEAST_SAMPLED = 2**9
SAMPLED_PART = 256


def sample_stride(parameters: int) -> int:
    """The stride of φ's entries in the sample; odd, or it would be the same columns of every matrix."""
    sampled = min(SAMPLED_PARAMETERS, max(LEAST_SAMPLED, parameters // SAMPLED_PART))
    return (parameters // sampled) | 1


def sampled(values: torch.Tensor) -> torch.Tensor:
    """The sample of a tensor [parameters]; a view."""
    return values[:: sample_stride(values.numel())]


def blocks_in(bounds: slice) -> slice:
    """The blocks of these entries, which begin with one."""
    return slice(bounds.start // BLOCK, -(-bounds.stop // BLOCK))


def seeds_of(pair: str, indices: Sequence[int]) -> list[int]:
    return [seed_of(pair, index) for index in indices]


def weights_of(overlap: str, settings: OuterSettings) -> dict[Part, float]:
    """The parts that a contribution travels in, in this order, and the factor of each in z."""
    if overlap == "phi-early":
        return {"phi": settings.gamma, "progress": settings.beta}
    return {"z": 1.0}


class TensorPool:
    """Flat float32 tensors on the CPU, to be used again: taking fresh memory costs more than filling it.

    Those not in use are never more than were in use at once of their size.
    """

    def __init__(self) -> None:
        self._free = defaultdict[int, list[torch.Tensor]](list)  # by size

    @property
    def free(self) -> int:
        """The number of tensors that are not in use."""
        return sum(map(len, self._free.values()))

    def take(self, parameters: int) -> torch.Tensor:
        """A tensor [parameters] with anything in it."""
        free = self._free[parameters]
        return free.pop() if free else torch.empty(parameters)

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back a tensor that nothing refers to any more, not even work that was cancelled."""
        self._free[tensor.numel()].append(tensor)


class IncomingUpdate:
    """Collects the partner's contribution to a round, piece by piece.

    Its memory is taken when the first piece comes; it is on the CPU.
    """

    def __init__(self, buffers: TensorPool, weights: Mapping[Part, float], own: Fragment) -> None:
        """`own` is the same fragment here."""
        self._buffers = buffers
        self._parameters = own.parameters
        self._weights = {part: weight / 2 for part, weight in weights.items()}
        self._summed: dict[Part, set[int]] = {part: set() for part in weights}
        self._compressed: dict[Part, dict[int, Encoded]] = {part: {} for part in weights}
        self.pieces = len(weights) * own.pieces  # of all parts
        self._missing = self.pieces
        self._sum: torch.Tensor | None = None

    @property
    def pieces_in(self) -> int:
        """The number of pieces that are there."""
        return self.pieces - self._missing

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
        if values.codec == COMPRESSED or values.codec in BITS:
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
            if index in self._compressed[part] and index not in self._summed[part]:
                add_scaled(target, self._compressed[part][index], weight)

    @torch.no_grad()
    def read_beside(
        self, indices: Sequence[int], own: Fragment, pair: str
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Read pieces of z that follow one another beside the own one, whatever they came in; it may be done again.

        Returns, for each of their blocks, how far the two are apart, the codec's rounding not counted, and whether it
        could not be read; that counts as the own z until it is left out.
        """
        came = [self._compressed["z"].get(index) for index in indices]
        near = [encoded for encoded in came if encoded is not None and encoded.codec in BITS]
        if len(near) == len(came) and len({encoded.codec for encoded in near}) == 1:
            return [self._read_near(indices, near, own, pair)]
        if len(indices) > 1:
            return [found for index in indices for found in self.read_beside([index], own, pair)]
        z = own.contribution(bounds := own.bounds_of(indices))
        half = torch.empty(len(z))
        self.read(indices[0], bounds, half)
        unread = torch.zeros(-(-len(z) // BLOCK), dtype=torch.bool)
        return [(distance_of(half.to(z.device), z / 2).cpu() * 2, unread)]

    def _read_near(
        self, indices: Sequence[int], came: Sequence[Encoded], own: Fragment, pair: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z, seeds = own.contribution(bounds := own.bounds_of(indices)), seeds_of(pair, indices)
        values, is_read = read_beside(z, came, seeds, own.piece_parameters)
        if not is_read.all():  # a partner that is where this replica was before the round
            before = own.offered_phi(bounds) * own.settings.gamma
            others, more = read_beside(before, came, seeds, own.piece_parameters)
            more &= ~is_read
            rows = more.repeat_interleave(BLOCK)[: len(z)]
            values, is_read = torch.where(rows, others, values), is_read | more
        torch.mul(values.cpu(), self._weights["z"], out=self.total[bounds])
        self._summed["z"].update(indices)
        apart = (distance_of(values, z).cpu().square() - rounding_of(came).square()).clamp_min(0).sqrt()
        return apart, ~is_read.cpu()

    @property
    def total(self) -> torch.Tensor:
        """½z [parameters], without what came compressed."""
        if self._sum is None:
            self._sum = self._buffers.take(self._parameters)
        return self._sum

    def give_back(self) -> None:
        """Give back the memory: the round is over, and nobody refers to z."""
        if self._sum is not None:
            self._buffers.give_back(self._sum)
            self._sum = None


class OutgoingUpdate:
    """Encodes this replica's contribution to a round, piece by piece.

    What was sent with losses is kept until the round is over. With a codec for near replicas, and `nearness` that
    knows of none, z goes in int8.
    """

    def __init__(
        self,
        own: Fragment,
        weights: Mapping[Part, float],
        wire: Wire,
        transfer: DeviceTransfer,
        nearness: Nearness | None = None,
        pair: str = "",
    ) -> None:
        self._own = own
        self._transfer = transfer
        self._weights = weights
        self._codecs: dict[Part, str] = {"z": wire.gossip, "phi": wire.gossip, "progress": wire.progress}
        self._nearness = nearness
        self._pair = pair
        # the partner's sample of φ, if it came before this is encoded
        self.partners_phi: torch.Tensor | None = None
        # the distance that the cells of each block were made for, where they were: [blocks]
        self.allowed = torch.zeros(-(-own.parameters // BLOCK)) if nearness is not None else None
        self._sent: dict[tuple[Part, int], Encoded] = {}

    def pieces(self) -> Iterator[tuple[int, slice]]:
        for index in range(self._own.pieces):
            yield index, self._own.piece_bounds(index)

    def encode(self, part: Part, indices: Sequence[int]) -> list[list[Encoded]]:
        """The tensors of the messages that carry these pieces.

        They may share memory with φ: send them before the outer step. Raises `CodecError` when the codec cannot
        carry the values.
        """
        if self._codecs[part] in BITS:
            return [[sent] for group in self._own.in_groups(indices) for sent in self._encode_near(group)]
        return [self._encode(part, index) for index in indices]

    def encode_soon(self, part: Part, indices: Sequence[int]) -> Pending[list[list[Encoded]]]:
        """Encode pieces that follow one another, as `encode` does. On a GPU all come to the host in one copy."""
        if self._codecs[part] in BITS or not self._transfer.encodes_there:
            return Here(self.encode(part, indices))
        bounds = self._own.bounds_of(indices)
        codec, count = self._codecs[part], bounds.stop - bounds.start
        made = packed(self._exact(part, bounds), codec)
        flag, raw = self._transfer.to_host(made.flag), self._transfer.to_host(made.raw)

        def arrived() -> list[list[Encoded]]:
            pieces = unpacked_pieces(codec, count, raw.wait(), flag.wait(), self._own.piece_parameters)
            if codec != LOSSLESS:
                self._sent.update(
                    {(part, index): piece for index, piece in zip(indices, pieces, strict=True)}
                )
            return [[piece, *self._sample(part, index)] for index, piece in zip(indices, pieces, strict=True)]

        return self._transfer.hand_over(Deferred(arrived))

    def _sample(self, part: Part, index: int) -> list[Encoded]:
        """The sample of φ to go beside the first piece of z; for a codec for near replicas it has gone before."""
        if part != "z" or index > 0 or self._nearness is not None:
            return []
        return [self.encode_sample()]

    @torch.no_grad()
    def encode_sample(self) -> Encoded:
        """Every n-th entry of φ."""
        return encode(sampled(self._own.offered_phi(EVERYTHING)), LOSSLESS)

    def add_as_sent(self, index: int, bounds: slice, target: torch.Tensor, factor: float) -> None:
        """target ← target + factor·ẑ over one piece, ẑ being the own z as the partner reads it.

        All of it must have been encoded, and the round's weights still be there.
        """
        if target.device.type == "cpu":
            self.add_with_losses(index, target, factor)
        else:
            lost = self.add_with_losses(index, torch.zeros(len(target)), factor)
            target.add_(lost.to(target.device))
        self.add_near([index], target, factor)
        self.add_without_losses(bounds, target, factor)

    def add_with_losses(self, index: int, target: torch.Tensor, factor: float) -> torch.Tensor:
        """Add, on the host, those parts as sent that a codec of one tensor has changed. Returns `target`."""
        for part, weight in self._weights.items():
            sent = self._sent.get((part, index))
            if sent is not None and sent.codec not in BITS:
                add_scaled(target, sent, factor * weight)
        return target

    def add_near(self, indices: Sequence[int], target: torch.Tensor, factor: float) -> None:
        """Add, on the replica's device, pieces as sent that follow one another and went to a near partner."""
        if any(
            ("z", index) not in self._sent or self._sent["z", index].codec not in BITS for index in indices
        ):
            if len(indices) > 1:
                for index, rows in zip(indices, torch.split(target, self._own.piece_parameters), strict=True):
                    self.add_near([index], rows, factor)
            return
        z = self._own.contribution(self._own.bounds_of(indices))
        sent = [self._sent["z", index] for index in indices]
        read = as_sent(z, sent, seeds_of(self._pair, indices), self._own.piece_parameters)
        target.add_(read, alpha=factor * self._weights["z"])

    def add_without_losses(self, bounds: slice, target: torch.Tensor, factor: float) -> None:
        """Add, on the replica's device, those parts that arrive as they are, over any bounds."""
        for part, weight in self._weights.items():
            if self._codecs[part] == LOSSLESS:
                target.add_(self._exact(part, bounds), alpha=factor * weight)

    @torch.no_grad()
    def _encode(self, part: Part, index: int) -> list[Encoded]:
        bounds = self._own.piece_bounds(index)
        return [self._encode_piece(part, index, bounds), *self._sample(part, index)]

    def _encode_piece(self, part: Part, index: int, bounds: slice) -> Encoded:
        codec, values = self._codecs[part], self._exact(part, bounds)
        if codec == LOSSLESS:
            return encode(require_finite(values), codec)
        encoded = self._sent[part, index] = encode(values, codec)
        if codec != "int8":  # it has refused NaN and infinity already
            require_finite(as_read(encoded))
        return encoded

    @torch.no_grad()
    def _encode_near(self, indices: Sequence[int]) -> list[Encoded]:
        """These pieces of z, which follow one another, as a near partner can read them; in int8 where none is known
        to be near.
        """
        assert self._nearness is not None
        assert self.allowed is not None
        bounds, codec = self._own.bounds_of(indices), self._codecs["z"]
        blocks, progress = blocks_in(bounds), self._own.offered_progress(bounds)
        moved = distance_of(progress * self._own.settings.beta, torch.zeros_like(progress)).cpu()
        if indices[0] == 0:
            self._look(self._nearness)
        z = self._own.contribution(bounds)
        if not self._nearness.is_known:
            self.allowed[blocks] = moved
            sent = [encode(piece, COMPRESSED) for piece in torch.split(z, self._own.piece_parameters)]
        else:
            self.allowed[blocks] = self._nearness.distances(blocks, moved)
            cells = self._nearness.cells(blocks, moved, codec).to(z.device)
            sent = encode_near(z, codec, cells, seeds_of(self._pair, indices), self._own.piece_parameters)
        self._sent.update({("z", index): piece for index, piece in zip(indices, sent, strict=True)})
        return sent

    def _look(self, nearness: Nearness) -> None:
        """Tell how far the partner is by its sample of φ, and if it has moved since as much as this replica has."""
        if self.partners_phi is None:
            return
        own, settings = self._own, self._own.settings
        phi = sampled(own.offered_phi(EVERYTHING))
        squares = [own.offered_progress(bounds).square().sum() for _, bounds in self.pieces()]
        between = (self.partners_phi.to(phi.device) - phi).square().mean()
        apart, *all_squares = torch.stack([between, *squares]).cpu().tolist()  # a device is waited for once
        moved = settings.beta**2 * sum(all_squares) / own.parameters
        nearness.look((settings.gamma**2 * apart + 2 * moved) ** 0.5)

    def _exact(self, part: Part, bounds: slice) -> torch.Tensor:
        if part == "phi":
            return self._own.offered_phi(bounds)
        if part == "progress":
            return self._own.offered_progress(bounds)
        return self._own.contribution(bounds)
