"""A run as a node has reached it: what whoever looks for others, chooses a stage or moves has in common."""

from __future__ import annotations

from dataclasses import dataclass

from node.links.links import Links
from node.membership.view import View
from node.watch.events import Events
from protocol.access.admission import Admission
from protocol.rpc.rpc import Rpc
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import Supervisor
from protocol.transport.base import Transport
from protocol.windows import short, window


@dataclass(frozen=True)
class Membership:
    """A run as this node has reached it: its network, its manifest, and what is known of the other members."""

    rpc: Rpc
    signed: SignedManifest
    view: View
    links: Links
    events: Events
    supervisor: Supervisor  # of this node's parts
    admission: Admission | None = None  # of a run that has rules of access

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self.transport.peer_id)} | Run: {self.run_id} | View: {self.view!r}"

    @property
    def transport(self) -> Transport:
        return self.rpc.transport

    @property
    def run_id(self) -> str:
        return self.signed.run_id

    @property
    def lifetime(self) -> float:
        """Seconds that a record of the run lives."""
        return self.signed.manifest.limits.record_lifetime
