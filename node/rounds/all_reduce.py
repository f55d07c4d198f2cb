"""DiLoCo's averaging, the baseline: the mean of z over all live replicas of a stage.

The first of them by peer id tells all who takes part (`Assembly`). Then each owns every N-th part of the flat
tensor. It gets that part of z from everyone, and answers all of them with the mean once everyone's is there
(`Gathers`): a reduce-scatter and an all-gather in one request and its reply. Parts go to each owner in order, a
few at a time, so that what everyone has begun is whole before anybody goes far ahead, and memory does not grow with
the stage. All take the mean as it was encoded, the owner too: they stay bitwise equal with any codec. Every replica
sends and receives 2(N − 1)/N of the state, as in a ring, and waits for the slowest. NoLoCo exists to do without.

A replica that is slower than the others by less than the gossip deadline sets everyone's pace. One that is slower
than that is waited for once; then the others average without it, and it with them when its round ends within the
deadline before theirs, else alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from node.context import Context
from node.model.compute import Priority
from node.model.fragment import PIECE_PARAMETERS
from node.model.replica import Replica
from node.rounds.averager import Averager, RoundResult
from node.rounds.gathers import IN_FLIGHT, Assembled, Assembly, Gathers, Reduction
from node.rounds.kin import Kin, OtherShape, part_ways
from node.watch.trace import Track
from protocol.codecs.codec import Encoded, as_read, encode, require_finite_values
from protocol.errors import (
    MALFORMED,
    CodecError,
    DeadlineExceeded,
    NolocoError,
    OutOfMemory,
    PeerUnreachable,
    Refused,
)
from protocol.ground import PeerId
from protocol.messages.training import Assemble, Reduce, Reduced, RollCall
from protocol.rpc.rpc import Answer, Request, Rpc
from protocol.supervision import all_of

# gossip deadlines that a caller gives to an owner for a part, and to who calls the roll: one to carry it, two to wait
CALL_DEADLINES = 3
# of a roll: the caller may have read a newcomer's record before this replica. A made-up member costs a part of the
# state, which nobody averages, and an attempt to reach it
MOST_STRANGERS = 0.5
ALONE = {"alone": "nobody else came in time", "group": "another replica calls the roll"}


@dataclass
class _Share:
    """The parts of one owner that are still to be asked for, in order; empty `given_up`: it is asked."""

    owner: PeerId
    rest: Iterator[slice]
    given_up: str = ""  # why it is not


@dataclass
class _Round:
    """The outcome of one all-reduce."""

    present: Assembled
    mean: torch.Tensor  # z where there is no mean
    parts: int
    fewest: int  # members in the mean of a part
    kept: Counter[str] = field(default_factory=Counter)  # parts that stayed this replica's own, by reason


class AllReduce(Averager):
    """Averages over all live replicas of a stage: the DiLoCo baseline."""

    def __init__(self, context: Context, replica: Replica) -> None:
        super().__init__(context, replica)
        self._kin = Kin(context, replica)
        self._codec = context.manifest.wire.gossip
        self._seconds = context.manifest.limits.gossip_deadline
        life = f"{context.me[-16:]}-{context.transport.now():.6f}"  # a restarted node calls other rolls
        self._assembly = Assembly(life, self._seconds, self.live)
        self.gathers = Gathers(self._codec, self._seconds)
        self.bytes_sent = 0

    def _doing(self) -> str:
        return f"replicas: {len(self.live())}, bytes sent: {self.bytes_sent}, parts waiting here: {self.gathers.held}"

    @property
    def will_wait(self) -> bool:
        return True

    async def finish(self) -> RoundResult:
        """Average with all live replicas and take the outer step; alone where there is no memory for that.

        Deadline: none for the whole, as `mean` says.
        """
        context, replica, sent_before = self._context, self._replica, self.bytes_sent
        try:
            z = await context.compute.run(Priority.OPTIMIZER, replica.whole.contribution)
        except OutOfMemory:
            await self._step_without_memory(replica.round, replica.whole)
        else:
            with context.trace.span(Track.ROUND_END, "wait for all replicas"):
                mean = await self.mean(z)
            await context.compute.run(Priority.OPTIMIZER, replica.finish_round, mean)
        sent = self.bytes_sent - sent_before
        context.counters.gossip_bytes += sent
        return RoundResult(gossip_bytes=sent)

    def live(self) -> list[PeerId]:
        """This replica and all others of its stage and lineage that train, by peer id."""
        context = self._context
        serving = context.view.serving(context.stage, context.transport.now())
        return sorted({*self._kin.among(serving), context.me})

    async def mean(self, z: torch.Tensor) -> torch.Tensor:
        """The mean of z [parameters] over the live replicas.

        Deadline: none for the whole, since its time grows with the stage. A part takes `CALL_DEADLINES` gossip
        deadlines at most; when its owner does not answer, that part and the owner's others stay this replica's own,
        and the volunteer is told. An owner answers with what it has when a member does not come.
        """
        if len(self.live()) < 2:
            return z.clone()
        try:
            present = await self._assemble()
        except NolocoError as failure:
            self._tell_alone(failure)
            return z.clone()
        self.gathers.begin(present)
        return await self._average(z, present)

    async def _assemble(self) -> Assembled:
        """Find out who takes part. Raises when nobody else does, or the one that calls the roll does not answer."""
        context, caller = self._context, self.live()[0]
        if caller == context.me:
            return await self._assembly.join(context.me)
        deadline = CALL_DEADLINES * self._seconds
        try:
            told, _ = await context.rpc.call(caller, Assemble(), deadline=deadline)
        except (DeadlineExceeded, PeerUnreachable):
            context.view.suspect(caller)
            raise
        members = tuple(sorted({PeerId(member) for member in told.members}))
        if context.me not in members or len(members) < 2:
            raise CodecError("the roll lacks this replica")
        known = context.view.members(context.stage, context.transport.now())
        strangers = set(members) - {context.me, *(member.peer for member in known)}
        if len(strangers) > MOST_STRANGERS * len(members):
            raise CodecError(f"the roll names {len(strangers)} peers that are no replicas of this stage")
        return Assembled(told.name, members)

    async def _average(self, z: torch.Tensor, present: Assembled) -> torch.Tensor:
        members = present.members
        parts = _parts_of(z.numel(), len(members))
        outcome = _Round(present, z.clone(), len(parts), fewest=len(members))
        shares = [_Share(owner, iter(parts[number :: len(members)])) for number, owner in enumerate(members)]
        await all_of(*(self._work_off(share, z, outcome) for share in shares for _ in range(IN_FLIGHT)))
        self._tell(outcome)
        return outcome.mean

    async def _work_off(self, share: _Share, z: torch.Tensor, outcome: _Round) -> None:
        """Ask the owner for one part after another; after a failure that is not the part's, for none of them."""
        for bounds in share.rest:
            reason = share.given_up
            if not reason:
                try:
                    reduction = await self._ask(share.owner, bounds, z[bounds], outcome.present.name)
                except NolocoError as failure:
                    reason = self._reason(share.owner, failure)
                    if not _is_of_the_part(failure):
                        share.given_up = reason
                else:
                    outcome.mean[bounds].copy_(as_read(reduction.mean))
                    outcome.fewest = min(outcome.fewest, reduction.members)
            if reason:
                outcome.kept[reason] += 1

    async def _ask(self, owner: PeerId, bounds: slice, part: torch.Tensor, name: str) -> Reduction:
        """The mean of a part [entries]. Raises `CodecError` when values cannot be sent, or an answer does not fit."""
        encoded = await self._context.compute.run(Priority.OPTIMIZER, encode, part.cpu(), self._codec)
        require_finite_values(encoded)
        if owner == self._context.me:
            return await self.gathers.contribute(owner, name, bounds.start, encoded)
        self.bytes_sent += 2 * encoded.nbytes  # it costs the owner as much to answer
        return await self._context.rpc.call_and_read(
            owner,
            Reduce(offset=bounds.start, total=self._replica.parameters, name=name),
            [encoded],
            deadline=CALL_DEADLINES * self._seconds,
            read=lambda reply, tensors: Reduction(encode(tensors[0], "fp32"), reply.members),
        )

    # --- telling ------------------------------------------------------------------------------

    def _reason(self, owner: PeerId, failure: NolocoError) -> str:
        """Say for people what failed; an owner that does not answer is suspected."""
        name = self._context.view.called(owner)
        if isinstance(failure, DeadlineExceeded | PeerUnreachable):
            self._context.view.suspect(owner)
            return f"{name} did not answer"
        if isinstance(failure, Refused) and failure.code == MALFORMED:
            part_ways(self._context, owner)
        elif isinstance(failure, Refused) and failure.code in ("late", "alone"):
            return (
                f"{name} had this node's part too late"
                if failure.code == "late"
                else f"nobody came to {name}"
            )
        return f"{name}: {failure}"

    def _tell_alone(self, failure: NolocoError) -> None:
        code = failure.code if isinstance(failure, Refused) else ""
        reason = ALONE.get(code, str(failure))
        self._context.events.warn(
            f"This round is averaged with no other replica ({reason}) and counts its own progress alone. "
            "Training goes on; should it happen every round, `noloco status` shows which of them is slow or gone.",
            "all-reduce-alone",
            reason=reason,
        )

    def _tell(self, outcome: _Round) -> None:
        kept, members = sum(outcome.kept.values()), len(outcome.present.members)
        if not kept and outcome.fewest == members:
            return
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in outcome.kept.items())
        without = f"{kept:,} of {outcome.parts:,} parts stayed this node's own ({reasons}). " if kept else ""
        fewer = "" if outcome.fewest == members else f"Some are the mean of {outcome.fewest} replicas only. "
        self._context.events.warn(
            f"Averaging {members} replicas was incomplete. {without}{fewer}"
            "Training goes on; should it happen every round, `noloco status` shows which of them is slow or gone.",
            "all-reduce-incomplete",
            parts=outcome.parts,
            kept=kept,
            members=members,
            fewest=outcome.fewest,
            reasons=dict(outcome.kept),
        )

    # --- answering ----------------------------------------------------------------------------

    def serve(self, rpc: Rpc) -> None:
        rpc.handle(Assemble.answered_by(self.on_assemble), Reduce.answered_by(self.on_reduce))

    async def on_assemble(self, request: Request[Assemble]) -> Answer[RollCall]:
        """Answer another replica's call once all have come. Refuses who is not known to be of this stage."""
        live = self.live()
        if live[0] != self._context.me or not self._is_known(request.peer):
            raise Refused("group")
        present = await self._assembly.join(request.peer)
        return Answer(RollCall(name=present.name, members=list(present.members)))

    async def on_reduce(self, request: Request[Reduce]) -> Answer[Reduced]:
        """Take in another replica's part of z; answered with the mean. Refuses what does not fit this stage."""
        message = request.message
        if not self._is_known(request.peer):
            raise Refused("group")
        try:
            part = self._checked(message, request.encoded())
        except OtherShape:
            part_ways(self._context, request.peer)
            raise
        reduction = await self.gathers.contribute(request.peer, message.name, message.offset, part)
        return Answer(Reduced(members=reduction.members), [reduction.mean])

    def _is_known(self, peer: PeerId) -> bool:
        """Return whether the peer is a member of this stage, of a version that averages with this one."""
        if not self._context.view.can_average(peer):
            return False
        members = self._context.view.members(self._context.stage, self._context.transport.now())
        return any(member.peer == peer for member in members)

    def _checked(self, message: Reduce, tensors: list[Encoded]) -> Encoded:
        """Check a part. Raises `CodecError` if it does not fit; nothing is decoded before its size is known."""
        parameters = self._replica.parameters
        if message.total != parameters or len(tensors) != 1 or len(tensors[0].shape) != 1:
            raise OtherShape("a contribution does not have the shape of this stage")
        (part,) = tensors
        entries = part.shape[0]
        if not 0 < entries <= min(PIECE_PARAMETERS, parameters - message.offset):
            raise CodecError("a contribution does not lie within this stage")
        if part.codec != self._codec:
            raise OtherShape(f"contributions do not travel in {part.codec}")
        require_finite_values(part)
        return part

    async def close(self) -> None:
        """Refuse what waits here: this replica averages with nobody any more."""
        self._assembly.close()
        self.gathers.close()


def _is_of_the_part(failure: NolocoError) -> bool:
    """Return whether the owner's next parts may fare better."""
    return isinstance(failure, CodecError) or (isinstance(failure, Refused) and failure.code == "late")


def _parts_of(parameters: int, members: int) -> list[slice]:
    """Divide into parts, in order; the n-th belongs to the (n modulo members)-th of the group."""
    size = min(PIECE_PARAMETERS, max(1, -(-parameters // members)))
    return [slice(start, min(start + size, parameters)) for start in range(0, parameters, size)]
