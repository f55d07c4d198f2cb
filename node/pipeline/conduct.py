"""Records what the peers of the next stage do, leaves offenders out, and logs what a volunteer should know."""

from __future__ import annotations

from node.context import Context
from node.membership.ledger import HOLDS
from protocol.errors import (
    DeadlineExceeded,
    NolocoError,
    OddGradient,
    OddLoss,
    PeerUnreachable,
    Refused,
    WireError,
)
from protocol.ground import PeerId


class Conduct:
    """Passes what peers of the next stage do to the view, the ledger and the log.

    What follows from it is in the ledger's table.
    """

    def __init__(self, context: Context, stage: int) -> None:
        """`stage` is that of the peers."""
        self._context = context
        self._stage = stage
        self._ledger = context.view.ledger

    def usable(self) -> list[PeerId]:
        """Return the peers that serve the stage and are not in quarantine; all that serve it rather than none."""
        view = self._context.view
        peers, now = view.serving(self._stage, self._context.transport.now()), view.elapsed()
        return [peer for peer in peers if not self._ledger.is_quarantined(peer, now)] or list(peers)

    def record_good(self, peer: PeerId) -> None:
        """Record a good answer: the stage is served."""
        self._context.view.trust(peer)
        self._ledger.record_meeting(peer, False, self._context.view.elapsed())
        counters = self._context.counters
        if counters.no_peer_since is not None:
            counters.no_peer_since = None
            self._context.events.say(f"Stage {self._stage} is served again.", "peer-again", stage=self._stage)

    def record_bad(self, peer: PeerId) -> None:
        """Record an offence: the peer gets no microbatch for a while, after repeats for long."""
        view = self._context.view
        view.suspect(peer)
        if self._ledger.record_meeting(peer, True, view.elapsed()):
            self._context.events.warn(
                f"Peer {self._context.view.called(peer)} keeps giving worthless or strange answers or "
                "microbatches; it is left alone for a while. If it is yours, start it again.",
                "left-alone",
                peer=peer,
            )

    def record_overruled(self, peer: PeerId, refusal: Refused, asked: float) -> None:
        """Record that another peer took a microbatch that this one, asked at `asked`, refused for its content."""
        if refusal.code == OddLoss.CODE and not isinstance(refusal, OddGradient):
            return  # each peer judges a loss by what it has seen of this sender
        if self._ledger.record_overruling(peer, asked, self._context.view.elapsed()):
            self.record_bad(peer)

    def record_failure(self, peer: PeerId, failure: NolocoError, asked: float) -> None:
        """Record that the peer, asked at `asked`, gave no answer or broke the protocol."""
        if isinstance(failure, WireError):
            self.record_bad(peer)
        else:
            self._context.view.suspect(peer, asked=asked)
        event = {"peer": peer, "reason": type(failure).__name__}
        if not self._ledger.record_event(peer, event["reason"]):
            self._context.events.emit("resend", **event)
            return
        self._context.events.warn(
            f"Peer {self._context.view.called(peer)} of stage {self._stage} {_what_happened(failure)}; "
            "its microbatch goes to another one.",
            "resend",
            **event,
        )

    def record_holding(self, peer: PeerId, held: float, others_took: float) -> None:
        """Record that the peer has had a microbatch for `held` seconds, for which another one took `others_took`."""
        if self._ledger.record_event(peer, HOLDS):
            self._context.events.warn(
                f"Peer {self._context.view.called(peer)} of stage {self._stage} has had a microbatch for "
                f"{held:.0f} s that another one answered within {others_took:.1f} s. What it keeps for long goes to "
                "others, too. If that peer is yours, look at its log.",
                "held",
                peer=peer,
                seconds=round(held, 1),
            )

    def record_nobody(self) -> None:
        """Record that no live peer serves the stage."""
        context, stage = self._context, self._stage
        if context.counters.no_peer_since is None:
            context.counters.no_peer_since = context.view.elapsed()
            context.events.warn(
                f"No live peer serves stage {stage} at present; waiting for one.", "no-peer", stage=stage
            )


def _what_happened(failure: NolocoError) -> str:
    if isinstance(failure, PeerUnreachable):
        return "cannot be reached"
    if isinstance(failure, DeadlineExceeded):
        return f"fell silent: it gave {failure}"
    return f"broke the protocol ({failure})"
