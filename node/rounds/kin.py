"""The replicas of a stage with which this one averages: of the same history, and of a version that fits."""

from __future__ import annotations

from collections.abc import Iterable

from node.context import Context
from node.membership.view import Member
from node.model.replica import Replica
from protocol.errors import CodecError
from protocol.ground import PeerId
from protocol.records.announcement import Announcement
from protocol.records.lineage import Lineage
from protocol.rpc.compatibility import named_version, who_upgrades
from protocol.windows import window

ASK_AGAIN_SECONDS = 30.0  # after others were asked whether an older lineage is one
LEFT_ALONE_SECONDS = 60.0  # an older lineage of which nobody gave the state


class OtherShape(CodecError):
    """Contributions of the partner are not of the shape that this version reads."""


def part_ways(context: Context, partner: PeerId) -> None:
    """Average with this replica no more, since one of the two cannot read what the other sends; say so once."""
    if not context.view.note_apart(partner):
        return
    member = context.view.record_of(partner)
    program = member.announcement.program if member is not None else ""
    context.events.warn(
        f"Cannot average with {context.view.called(partner)}, which runs {named_version(program)}: contributions of "
        f"the two versions do not fit. Microbatches still go both ways. {who_upgrades(program)}",
        "version-apart",
        partner=partner,
        program=program,
    )


class Kin:
    """Tells the replicas of this one's lineage from others, and finds an older lineage, to which this one yields.

    Mutable state: when others were last asked for the past, until when an older lineage is left alone, and the
    lineage before any partner said when it began.
    """

    def __init__(self, context: Context, replica: Replica) -> None:
        self._context = context
        self._replica = replica
        self._asked_at = float("-inf")
        self._alone_until = float("-inf")
        self._before = replica.lineage

    @window
    def __repr__(self) -> str:
        return f"Stage: {self._context.stage} | Lineage: {self._replica.lineage}"

    @property
    def lifetime(self) -> float:
        return self._context.manifest.limits.record_lifetime

    def is_kin(self, peer: PeerId) -> bool:
        """Return whether the peer's record says this replica's lineage, and a version that averages with this one.

        Also where it has none yet.
        """
        view = self._context.view
        member = view.record_of(peer)
        return member is None or (self.is_alike(member.announcement) and view.can_average(peer))

    def is_alike(self, said: Announcement) -> bool:
        return said.lineage.is_same(self._replica.lineage, self.lifetime)

    def among(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Those of the peers that are kin, in their order."""
        return [peer for peer in peers if self.is_kin(peer)]

    def members(self) -> list[Member]:
        """The members of the stage that are kin, this replica among them."""
        context = self._context
        members = context.view.members(context.stage, context.transport.now())
        return [member for member in members if self.is_alike(member.announcement)]

    def holders(self, lineage: Lineage) -> dict[PeerId, Lineage]:
        """The others that can give a state of this lineage, each with what it says of it."""
        context, now = self._context, self._context.transport.now()
        holding = {*context.view.holding(context.stage, now)} - {context.me}
        told = {m.peer: m.announcement.lineage for m in context.view.members(context.stage, now)}
        return {
            peer: said
            for peer, said in told.items()
            if peer in holding and said.is_same(lineage, self.lifetime)
        }

    def met(self, partner: PeerId) -> None:
        """Note that this replica averaged with the partner: both began when the first of them did.

        All partners together move that by no more than first replicas are apart: else one that lies a little more
        each time would part this replica from the others.
        """
        member, own = self._context.view.record_of(partner), self._replica.lineage
        if member is None or not self.is_alike(member.announcement):
            return
        if not self._before.is_same(own, self.lifetime) or not self._before.begun:
            self._before = own
        joined = own.joined(member.announcement.lineage)
        if self._before.is_same(joined, self.lifetime):
            self._replica.lineage = joined

    # --- yielding -----------------------------------------------------------------------------

    def _older(self) -> list[Member]:
        """The members that have the stage's state and claim an older lineage."""
        context, own = self._context, self._replica.lineage
        members = context.view.members(context.stage, context.transport.now())
        return [
            member
            for member in members
            if member.announcement.state in ("serving", "finished")
            and member.announcement.lineage.is_before(own, self.lifetime)
        ]

    @property
    def older(self) -> Lineage | None:
        """The oldest lineage that a member of the stage has, older than this replica's and proved to be; or None."""
        past, stage, begun = self._context.past, self._context.stage, self._replica.lineage.begun
        if self._context.view.elapsed() < self._alone_until:
            return None
        claimed = [(member.announcement.lineage, member.peer) for member in self._older()]
        proved = [lineage for lineage, peer in claimed if past.proves(stage, peer, lineage, begun)]
        return min(proved, default=None)

    def leave_alone(self) -> None:
        """Go on training for a while: those of the older lineage gave nothing, and may not be reached from here."""
        self._alone_until = self._context.view.elapsed() + LEFT_ALONE_SECONDS

    async def ask(self) -> None:
        """Ask others for the past where somebody claims an older lineage and this node cannot say whether it is one.

        Takes `ASK_DEADLINE`, and asks every `ASK_AGAIN_SECONDS` at most.
        """
        now = self._context.view.elapsed()
        if self._older() and self.older is None and now >= self._asked_at + ASK_AGAIN_SECONDS:
            self._asked_at = now
            await self._context.ask_of_past()
