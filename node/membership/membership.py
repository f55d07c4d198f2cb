"""A run as a node has reached it: one object for the life of the process, shared by all of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.giving.ledger import ContributionLedger
from node.links.links import Links
from node.membership.past import Past
from node.membership.view import View
from node.watch.events import Events
from protocol.access.admission import Admission
from protocol.ground import PeerId
from protocol.rpc.rpc import Rpc
from protocol.run.manifest import Manifest
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
    past: Past  # of the run's stages
    admission: Admission | None = None  # of a run that has rules of access
    contributions: ContributionLedger = field(default_factory=ContributionLedger)

    @window
    def __repr__(self) -> str:
        return f"Peer: {short(self.me)} | Run: {self.run_id} | View: {self.view!r}"

    @property
    def transport(self) -> Transport:
        return self.rpc.transport

    @property
    def me(self) -> PeerId:
        return self.rpc.transport.peer_id

    @property
    def run_id(self) -> str:
        return self.signed.run_id

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def lifetime(self) -> float:
        """Seconds that a record of the run lives."""
        return self.manifest.limits.record_lifetime
