"""The exchange of a round: the own contribution to the partner in pieces, the partner's back, both at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NoReturn

import torch

from node.context import Context
from node.links.links import AdaptiveDeadline
from node.model.compute import Priority
from node.model.fragment import PIECE_PARAMETERS, Fragment, Stretch
from node.model.replica import Replica
from node.model.transfer import transfer_for
from node.rounds.contribution import (
    LOSSLESS,
    IncomingUpdate,
    OutgoingUpdate,
    TensorPool,
    sample_stride,
    weights_of,
)
from node.rounds.kin import OtherShape, part_ways
from node.rounds.meeting import Pair, fragment_named
from node.rounds.nearness import Nearness, Reading
from node.rounds.pair_exchange import PairExchange
from node.rounds.unread import bits_of, unread_in
from protocol.codecs.codec import Encoded, as_read, encode, require_finite, require_finite_values
from protocol.codecs.near_codecs import BITS
from protocol.errors import MALFORMED, CodecError, DeadlineExceeded, NolocoError, PeerUnreachable, Refused
from protocol.messages.training import Contribute, Part, Unread
from protocol.rpc.frames import MAX_TENSORS
from protocol.rpc.rpc import Traffic
from protocol.run.manifest import GOSSIP_CODECS
from protocol.supervision import all_of, cancelled

LEAST_DEADLINE = 5.0  # on a busy machine
# of one message: a piece in float32, or four in int8 with their scales; each costs as much time as 100 KB
BUNDLE_BYTES = 2**20 + 2**16
PIECES_PER_JOB = 4  # encoded in one go, so that they wait for the compute thread once
JOBS_IN_FLIGHT = 3  # one is encoded, one is written, one waits for the last answers
REMEMBERED_PAIRS = 8
ASK_SECONDS = 1.0  # how often to make sure of a partner that keeps one waiting


class Exchanges:
    """Makes the exchanges of rounds, answers partners' pieces and bounds the memory that they take.

    What they take in memory is bounded by the pairs that the matchmaker agrees to.
    """

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        # all of a replica takes many times as long as a fragment
        self._deadlines = {
            own: AdaptiveDeadline(context.manifest.limits.gossip_deadline, LEAST_DEADLINE)
            for own in (replica.whole, replica.fragments[0])
        }
        self._weights = weights_of(context.manifest.outer.overlap, replica.whole.settings)
        self._buffers = TensorPool()
        self._transfer = transfer_for(replica.device)
        self._is_near = context.manifest.wire.gossip in BITS
        self._nearness: dict[Fragment, Nearness] = {}
        self._exchanges: dict[Pair, PairExchange] = {}
        self._averaged: deque[Pair] = deque(maxlen=REMEMBERED_PAIRS)
        self._ending: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Exchanges, under way: {self.under_way}, buffers free: {self._buffers.free}>"

    @property
    def under_way(self) -> int:
        """The number of exchanges that are agreed or under way."""
        return len(self._exchanges)

    # --- the life of an exchange --------------------------------------------------------------

    def of(self, pair: Pair) -> PairExchange:
        """The exchange with this pair's partner; made when it is first asked for."""
        exchange = self._exchanges.get(pair)
        if exchange is None:
            context, replica = self._context, self._replica
            own = replica.fragment_of(fragment_named(pair.name, len(replica.fragments)))
            nearness, wire = self._nearness_of(own), context.manifest.wire
            outgoing = OutgoingUpdate(own, self._weights, wire, self._transfer, nearness, pair.name)
            incoming = IncomingUpdate(self._buffers, self._weights, own, pair.name)
            exchange = self._exchanges[pair] = PairExchange(pair, own, outgoing, incoming, context.supervisor)
        return exchange

    def _nearness_of(self, own: Fragment) -> Nearness | None:
        """How near replicas are in a fragment; None where the codec does not ask."""
        if not self._is_near:
            return None
        return self._nearness.setdefault(own, Nearness(own.parameters))

    def _deadline_of(self, exchange: PairExchange) -> AdaptiveDeadline:
        """The deadline of exchanges as large as this one: of all of the replica, or of a fragment."""
        replica = self._replica
        return self._deadlines[replica.whole if exchange.own is replica.whole else replica.fragments[0]]

    def begin(self, pair: Pair) -> None:
        """Begin the exchange of a pair agreed for the current round: φ, if it travels by itself, can go."""
        exchange = self.of(pair)
        if "phi" in self._weights and not exchange.is_over:
            exchange.send("phi", self._send(exchange, "phi"))
        if self._is_near and not exchange.is_over:
            exchange.send("sample", self._send_sample(exchange))

    async def finish(self, exchange: PairExchange, partner_by: float) -> bool:
        """Send what is not sent yet and wait for the rest of the partner's; returns whether both arrived.

        The partner's own round may last `partner_by` seconds more. Deadline: adaptive, from then on; False after it,
        and when the partner cannot be reached or refuses. Nothing is sent any more then.
        """
        context, began = self._context, asyncio.get_running_loop().time()
        deadline = self._deadline_of(exchange)
        seconds = deadline.seconds(partner_by)
        exchange.urgent.set()
        exchange.outgoing.partners_phi = exchange.phi_sample
        for part in self._weights:
            exchange.send(part, self._send(exchange, part))
        try:
            async with asyncio.timeout(seconds):
                await exchange.both_ways(self._make_sure_of(exchange))
                if (nearness := self._nearness_of(exchange.own)) is not None:
                    await self._read(exchange, nearness)
        except (NolocoError, TimeoutError) as failure:
            if isinstance(failure, TimeoutError | DeadlineExceeded):
                deadline.note_missed()
            if not isinstance(failure, Refused):
                context.view.suspect(exchange.pair.partner)
            elif failure.code == MALFORMED:
                part_ways(context, exchange.pair.partner)
            context.events.warn(
                f"Averaging with {context.view.called(exchange.pair.partner)} failed ({type(failure).__name__}); "
                "this round counts its own progress alone.",
                "exchange-failed",
                partner=exchange.pair.partner,
                reason=failure.code if isinstance(failure, Refused) else type(failure).__name__,
            )
            return False
        finally:
            await cancelled(exchange.end())
        deadline.note(asyncio.get_running_loop().time() - began)
        self._averaged.append(exchange.pair)
        return True

    def forget(self, exchange: PairExchange, averaged: bool) -> None:
        """Drop the exchange after the outer step. After a failure cancelled work may still write to its memory."""
        self._exchanges.pop(exchange.pair, None)
        if averaged:
            exchange.incoming.give_back()

    def drop_unless(self, is_wanted: Callable[[Pair], bool]) -> None:
        """Give up the exchanges of pairs that came to nothing."""
        for pair in [pair for pair in self._exchanges if not is_wanted(pair)]:
            self._ending = [task for task in self._ending if not task.done()] + self._exchanges.pop(
                pair
            ).end()

    def end_all(self) -> None:
        """End all, as the weights are about to be replaced: from now on partners are refused, and go on alone."""
        self._nearness.clear()
        for exchange in self._exchanges.values():
            self._ending += exchange.end()

    async def still(self) -> None:
        """Return when nothing that was given up refers to the weights any more: they may change then."""
        await cancelled(self._ending)
        self._ending.clear()

    async def _read(self, exchange: PairExchange, nearness: Nearness) -> None:
        """Read what came beside the own weights, and agree with the partner on what stays as it is."""
        reading: Reading = await self._context.compute.run(
            Priority.OPTIMIZER, exchange.incoming.read_beside_own
        )
        bits = encode(bits_of(reading.unread), "int32")
        exchange.bytes_sent += bits.nbytes
        self._context.counters.gossip_bytes += bits.nbytes
        await self._call(exchange, Unread(pair=exchange.pair.name), [bits])
        unread_there = await exchange.unread_there
        exchange.unread = reading.unread | unread_there
        assert exchange.outgoing.allowed is not None
        nearness.met(reading.found, exchange.outgoing.allowed, reading.unread, unread_there)

    # --- sending ------------------------------------------------------------------------------

    async def _send(self, exchange: PairExchange, part: Part) -> None:
        """Send all pieces of a part, acknowledged. Raises what the sending of one raised."""
        jobs = exchange.own.all_pieces.in_groups(max(PIECES_PER_JOB, exchange.own.pieces_at_once))
        await all_of(*(self._work_off(exchange, part, jobs) for _ in range(JOBS_IN_FLIGHT)))

    async def _send_sample(self, exchange: PairExchange) -> None:
        """Send the sample of φ while training goes on: how near the partner is decides what its contribution can
        be.
        """
        sample = await self._context.compute.run(Priority.FORWARD, exchange.outgoing.encode_sample)
        await self._send_bundle(exchange, "sample", 0, [sample])

    async def _work_off(self, exchange: PairExchange, part: Part, jobs: Iterator[Stretch]) -> None:
        for pieces in jobs:
            # with forward passes, not behind all of them: a busy stage would never send anything
            priority = Priority.OPTIMIZER if exchange.urgent.is_set() else Priority.FORWARD
            pending = await self._context.compute.run(priority, exchange.outgoing.encode_soon, part, pieces)
            rest = deque(_bundles(pieces.indices, await pending.result()))
            while rest and not exchange.urgent.is_set():
                await self._send_politely(exchange, part, *rest[0])
                rest.popleft()
            await all_of(*(self._send_bundle(exchange, part, *bundle) for bundle in rest))
            exchange.pieces_sent += len(pieces.indices)

    async def _send_politely(
        self, exchange: PairExchange, part: Part, index: int, tensors: list[Encoded]
    ) -> None:
        """Send one bundle of pieces at a time, and after it pause as long: half of the link at most."""
        async with exchange.turn:
            began = asyncio.get_running_loop().time()
            await self._send_bundle(exchange, part, index, tensors)
            await exchange.make_way(asyncio.get_running_loop().time() - began)

    async def _send_bundle(
        self, exchange: PairExchange, part: Part, index: int, tensors: list[Encoded]
    ) -> None:
        """Send pieces from `index` on; once more when the stream breaks: a repeated piece is harmless."""
        offset, total = index * PIECE_PARAMETERS, exchange.own.parameters
        message = Contribute(pair=exchange.pair.name, part=part, offset=offset, total=total)
        for is_last_try in (False, True):
            nbytes = sum(tensor.nbytes for tensor in tensors)
            exchange.bytes_sent += nbytes
            self._context.counters.gossip_bytes += nbytes
            try:
                await self._tell(exchange, message, tensors)
                return
            except PeerUnreachable:
                if is_last_try:
                    raise

    async def _make_sure_of(self, exchange: PairExchange) -> NoReturn:
        """Ask again and again with an empty piece: raises when the partner has given the pair up, or is gone."""
        total = exchange.own.parameters
        message = Contribute(
            pair=exchange.pair.name, part=next(iter(self._weights)), offset=total, total=total
        )
        while True:
            await asyncio.sleep(ASK_SECONDS)
            await self._tell(exchange, message, [])

    async def _call(self, exchange: PairExchange, message: Unread, tensors: list[Encoded]) -> None:
        """Call, once more when the stream breaks."""
        try:
            await self._tell(exchange, message, tensors)
        except PeerUnreachable:
            await self._tell(exchange, message, tensors)

    async def _tell(
        self, exchange: PairExchange, message: Contribute | Unread, tensors: list[Encoded]
    ) -> None:
        context, partner, deadline = (
            self._context,
            exchange.pair.partner,
            self._deadline_of(exchange).seconds(),
        )
        nbytes = sum(tensor.nbytes for tensor in tensors)
        clock = asyncio.get_running_loop().time
        with context.links.transfer(partner, Traffic.GOSSIP, nbytes, clock) if nbytes else nullcontext():
            await context.rpc.call(partner, message, tensors, deadline=deadline)

    # --- receiving ----------------------------------------------------------------------------

    def knows(self, pair: Pair) -> bool:
        return pair in self._exchanges

    def has_averaged(self, pair: Pair) -> bool:
        """Return whether this exchange succeeded: its pieces come again when our answers were lost."""
        return pair in self._averaged

    def receive(self, exchange: PairExchange, message: Contribute, tensors: list[Encoded]) -> None:
        """Take in pieces of the partner's contribution; what is there already changes nothing.

        Raises `Refused` when the exchange is over, and `CodecError` when a piece does not fit or holds NaN or
        infinity; nothing of the message is then kept.
        """
        if exchange.is_over:
            raise Refused("unknown-pair")
        parameters = exchange.own.parameters
        if message.offset == message.total == parameters and not tensors:
            return
        if message.part == "sample":
            self._receive_sample(exchange, tensors)
            return
        first, beside = divmod(message.offset, PIECE_PARAMETERS)
        if message.total != parameters or beside or message.offset >= parameters:
            raise OtherShape("a contribution does not have the size of this stage")
        if message.part not in self._weights:
            raise CodecError(f"contributions do not travel as {message.part} in this run")
        with_sample = message.part == "z" and first == 0 and not self._is_near
        pieces = {
            first + number: piece for number, piece in enumerate(tensors[:-1] if with_sample else tensors)
        }
        _require_shapes(exchange.own, pieces, tensors[-1] if with_sample and tensors else None)
        for tensor in tensors:
            if tensor.codec not in GOSSIP_CODECS or (tensor.codec in BITS and not self._is_near):
                raise CodecError(f"contributions do not travel in {tensor.codec}")
            require_finite_values(tensor)
        for index, piece in pieces.items():
            if not exchange.incoming.has(message.part, index):
                exchange.incoming.add(message.part, index, piece)
                if message.part == "phi":
                    _pick_sample(exchange, exchange.own.piece_bounds(index), piece)
        if with_sample and exchange.phi_sample is None:
            exchange.phi_sample = as_read(tensors[-1]).to(torch.float32, copy=True)
        if exchange.incoming.is_complete:
            exchange.received.set()

    def _receive_sample(self, exchange: PairExchange, tensors: list[Encoded]) -> None:
        expected = (LOSSLESS, (_sampled_of(exchange.own),))
        if not self._is_near or [(one.codec, one.shape) for one in tensors] != [expected]:
            raise OtherShape("a sample of the weights does not have the shape of this stage")
        exchange.phi_sample = require_finite(as_read(tensors[0])).clone()

    def receive_unread(self, exchange: PairExchange, tensors: list[Encoded]) -> None:
        """Take in which blocks the partner could not read.

        Raises `Refused` when the exchange is over, and `CodecError` for what does not have the stage's shape.
        """
        if exchange.is_over or not self._is_near:
            raise Refused("unknown-pair")
        unread = unread_in(tensors, exchange.own.parameters)
        if not exchange.unread_there.done():
            exchange.unread_there.set_result(unread)


def _sampled_of(own: Fragment) -> int:
    """The number of entries in the sample of φ."""
    return -(-own.parameters // sample_stride(own.parameters))


def _require_shapes(own: Fragment, pieces: Mapping[int, Encoded], sample: Encoded | None) -> None:
    fits = pieces and all(
        index < own.pieces and piece.shape == own.phi[own.piece_bounds(index)].shape
        for index, piece in pieces.items()
    )
    if sample is not None:
        fits = fits and sample.shape == (_sampled_of(own),)
    if not fits:
        raise OtherShape("a contribution does not have the shape of this stage")


def _pick_sample(exchange: PairExchange, bounds: slice, phi: Encoded) -> None:
    """Every n-th entry of the partner's φ."""
    stride = sample_stride(exchange.own.parameters)
    if exchange.phi_sample is None:
        exchange.phi_sample = torch.empty(_sampled_of(exchange.own))
    picked = as_read(phi)[-bounds.start % stride :: stride]
    first = -(-bounds.start // stride)
    exchange.phi_sample[first : first + len(picked)].copy_(picked)


def _bundles(
    indices: Sequence[int], pieces: Sequence[Sequence[Encoded]]
) -> Iterator[tuple[int, list[Encoded]]]:
    """Bundle pieces that follow one another, at most `BUNDLE_BYTES` in a message, with the index of the first.

    A piece with a sample of φ beside it goes by itself.
    """
    first, bundle, has_sample = indices[0], list[Encoded](), False
    for index, tensors in zip(indices, pieces, strict=True):
        nbytes = sum(tensor.nbytes for tensor in (*bundle, *tensors))
        is_full = nbytes > BUNDLE_BYTES or len(bundle) == MAX_TENSORS
        if bundle and (is_full or has_sample):
            yield first, bundle
            first, bundle = index, []
        bundle.extend(tensors)
        has_sample = len(tensors) > 1
    yield first, bundle
