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
from collections.abc import Mapping, Sequence

import torch

from node.model.fragment import EVERYTHING, Fragment, Stretch
from node.model.outer import OuterSettings
from node.model.transfer import Deferred, DeviceTransfer, Here, Pending
from node.rounds.nearness import Nearness, Reading
from protocol.codecs.codec import Encoded, add_scaled, as_read, encode, require_finite
from protocol.codecs.device_codec import packed, unpacked_pieces
from protocol.codecs.kernels import BLOCK
from protocol.codecs.lattice import distance_of
from protocol.codecs.near_codecs import BITS
from protocol.codecs.nearby import NearPieces, encode_near, seeds_of
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

    def __init__(self, buffers: TensorPool, weights: Mapping[Part, float], own: Fragment, pair: str) -> None:
        """`own` is the same fragment here, `pair` the name of the pair."""
        self._buffers = buffers
        self._own = own
        self._pair = pair
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

    def add(self, part: Part, index: int, values: Encoded) -> None:
        """Take in one piece of a part. A piece that is there already changes nothing. Raises `Refused`.

        Product and sum are rounded apart, so that the order in which parts come does not show in z.
        """
        if self.has(part, index):
            return
        bounds = self._own.piece_bounds(index)
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

    def read(self, piece: Stretch, target: torch.Tensor) -> None:
        """Read one piece of ½z into `target`, once all of its parts are there; that may be the piece of `total`."""
        [index] = piece.indices
        if not any(index in known for known in self._summed.values()):
            target.zero_()
        elif target.data_ptr() != self.total[piece.bounds].data_ptr():
            target.copy_(self.total[piece.bounds])
        for part, weight in self._weights.items():
            if index in self._compressed[part] and index not in self._summed[part]:
                add_scaled(target, self._compressed[part][index], weight)

    @torch.no_grad()
    def read_beside_own(self) -> Reading:
        """Read all of z, which must be there, beside this replica's, whatever it came in; it may be done again.

        On the compute thread, while this replica's z is what was sent. A block that could not be read counts as
        this replica's until it is left out.
        """
        own = self._own
        found = [
            one for group in own.all_pieces.in_groups(own.pieces_at_once) for one in self._read_beside(group)
        ]
        return Reading(torch.cat([one.found for one in found]), torch.cat([one.unread for one in found]))

    def _read_beside(self, pieces: Stretch) -> list[Reading]:
        came = [self._compressed["z"].get(index) for index in pieces.indices]
        near = [encoded for encoded in came if encoded is not None and encoded.codec in BITS]
        if len(near) == len(came) and len({encoded.codec for encoded in near}) == 1:
            return [self._read_near(pieces, near)]
        if len(came) > 1:
            return [found for piece in pieces.in_groups(1) for found in self._read_beside(piece)]
        z, half = pieces.z, torch.empty(len(pieces))
        self.read(pieces, half)
        unread = torch.zeros(-(-len(z) // BLOCK), dtype=torch.bool)
        return [Reading(distance_of(half.to(z.device), z / 2).cpu() * 2, unread)]

    def _read_near(self, pieces: Stretch, came: Sequence[Encoded]) -> Reading:
        z, near = pieces.z, _near(pieces, came, self._pair)
        values, is_read = near.read_beside(z)
        if not is_read.all():  # a partner that is where this replica was before the round
            others, more = near.read_beside(pieces.phi * self._own.settings.gamma)
            more &= ~is_read
            rows = more.repeat_interleave(BLOCK)[: len(z)]
            values, is_read = torch.where(rows, others, values), is_read | more
        torch.mul(values.cpu(), self._weights["z"], out=self.total[pieces.bounds])
        self._summed["z"].update(pieces.indices)
        apart = (distance_of(values, z).cpu().square() - near.rounding.square()).clamp_min(0).sqrt()
        return Reading(apart, ~is_read.cpu())

    @property
    def total(self) -> torch.Tensor:
        """½z [parameters], without what came compressed."""
        if self._sum is None:
            self._sum = self._buffers.take(self._own.parameters)
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

    def encode(self, part: Part, pieces: Stretch) -> list[list[Encoded]]:
        """The tensors of the messages that carry these pieces.

        They may share memory with φ: send them before the outer step. Raises `CodecError` when the codec cannot
        carry the values.
        """
        if self._codecs[part] in BITS:
            groups = pieces.in_groups(self._own.pieces_at_once)
            return [[sent] for group in groups for sent in self._encode_near(group)]
        return [self._encode(part, piece) for piece in pieces.in_groups(1)]

    def encode_soon(self, part: Part, pieces: Stretch) -> Pending[list[list[Encoded]]]:
        """Encode pieces as `encode` does. On a GPU all come to the host in one copy."""
        if self._codecs[part] in BITS or not self._transfer.encodes_there:
            return Here(self.encode(part, pieces))
        codec = self._codecs[part]
        made = packed(_exact(part, pieces), codec)
        flag, raw = self._transfer.to_host(made.flag), self._transfer.to_host(made.raw)

        def arrived() -> list[list[Encoded]]:
            sent = unpacked_pieces(codec, len(pieces), raw.wait(), flag.wait(), pieces.entries)
            if codec != LOSSLESS:
                self._remember(part, pieces, sent)
            return [
                [encoded, *self._sample(part, index)]
                for index, encoded in zip(pieces.indices, sent, strict=True)
            ]

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

    def _remember(self, part: Part, pieces: Stretch, sent: Sequence[Encoded]) -> None:
        self._sent.update(((part, index), one) for index, one in zip(pieces.indices, sent, strict=True))

    def add_as_sent(self, piece: Stretch, target: torch.Tensor, factor: float) -> None:
        """target ← target + factor·ẑ over one piece, ẑ being the own z as the partner reads it.

        All of it must have been encoded, and the round's weights still be there.
        """
        if target.device.type == "cpu":
            self.add_with_losses(piece, target, factor)
        else:
            lost = self.add_with_losses(piece, torch.zeros(len(target)), factor)
            target.add_(lost.to(target.device))
        self.add_near(piece, target, factor)
        self.add_without_losses(piece, target, factor)

    def add_with_losses(self, piece: Stretch, target: torch.Tensor, factor: float) -> torch.Tensor:
        """Add, on the host, those parts of one piece that a codec of one tensor has changed. Returns `target`."""
        [index] = piece.indices
        for part, weight in self._weights.items():
            sent = self._sent.get((part, index))
            if sent is not None and sent.codec not in BITS:
                add_scaled(target, sent, factor * weight)
        return target

    def add_near(self, pieces: Stretch, target: torch.Tensor, factor: float) -> None:
        """Add, on the replica's device, those pieces as sent that went to a near partner."""
        sent = [self._sent.get(("z", index)) for index in pieces.indices]
        near = [encoded for encoded in sent if encoded is not None and encoded.codec in BITS]
        if len(near) == len(sent):
            as_sent = _near(pieces, near, self._pair).as_sent(pieces.z)
            target.add_(as_sent, alpha=factor * self._weights["z"])
        elif near:
            for piece, rows in zip(pieces.in_groups(1), pieces.split(target), strict=True):
                self.add_near(piece, rows, factor)

    def add_without_losses(self, pieces: Stretch, target: torch.Tensor, factor: float) -> None:
        """Add, on the replica's device, those parts that arrive as they are."""
        for part, weight in self._weights.items():
            if self._codecs[part] == LOSSLESS:
                target.add_(_exact(part, pieces), alpha=factor * weight)

    @torch.no_grad()
    def _encode(self, part: Part, piece: Stretch) -> list[Encoded]:
        return [self._encode_piece(part, piece), *self._sample(part, piece.indices[0])]

    def _encode_piece(self, part: Part, piece: Stretch) -> Encoded:
        codec, values = self._codecs[part], _exact(part, piece)
        if codec == LOSSLESS:
            return encode(require_finite(values), codec)
        encoded = encode(values, codec)
        self._remember(part, piece, [encoded])
        if codec != "int8":  # it has refused NaN and infinity already
            require_finite(as_read(encoded))
        return encoded

    @torch.no_grad()
    def _encode_near(self, pieces: Stretch) -> list[Encoded]:
        """Encode pieces of z as a near partner can read them; in int8 where none is known to be near."""
        assert self._nearness is not None
        assert self.allowed is not None
        codec, progress = self._codecs["z"], pieces.progress
        moved = distance_of(progress * self._own.settings.beta, torch.zeros_like(progress)).cpu()
        if pieces.indices[0] == 0:
            self._look(self._nearness)
        z = pieces.z
        if not self._nearness.is_known:
            self.allowed[pieces.blocks] = moved
            sent = [encode(piece, COMPRESSED) for piece in pieces.split(z)]
        else:
            self.allowed[pieces.blocks] = self._nearness.distances(pieces.blocks, moved)
            cells = self._nearness.cells(pieces.blocks, moved, codec).to(z.device)
            sent = encode_near(z, codec, cells, seeds_of(self._pair, pieces.indices), pieces.entries)
        self._remember("z", pieces, sent)
        return sent

    def _look(self, nearness: Nearness) -> None:
        """Tell how far the partner is by its sample of φ, and if it has moved since as much as this replica has."""
        if self.partners_phi is None:
            return
        own, settings = self._own, self._own.settings
        phi = sampled(own.offered_phi(EVERYTHING))
        squares = [piece.progress.square().sum() for piece in own.all_pieces.in_groups(1)]
        between = (self.partners_phi.to(phi.device) - phi).square().mean()
        apart, *all_squares = torch.stack([between, *squares]).cpu().tolist()  # a device is waited for once
        moved = settings.beta**2 * sum(all_squares) / own.parameters
        nearness.look((settings.gamma**2 * apart + 2 * moved) ** 0.5)


def _near(pieces: Stretch, encoded: Sequence[Encoded], pair: str) -> NearPieces:
    return NearPieces(encoded, seeds_of(pair, pieces.indices), pieces.entries)


def _exact(part: Part, pieces: Stretch) -> torch.Tensor:
    return pieces.phi if part == "phi" else pieces.progress if part == "progress" else pieces.z
