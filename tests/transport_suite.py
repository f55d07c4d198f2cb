"""What every transport must do. Subclasses say how to make a network and which event loop runs it."""

from __future__ import annotations

from tests.transport_peers import Peers
from tests.transport_records import Records
from tests.transport_streams import Streams


class TransportSuite(Streams, Peers, Records):
    """All of it."""
