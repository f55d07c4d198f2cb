"""The one interface between peers, and its two implementations (`libp2p`, `memory`)."""

from protocol.transport.base import Handler, PeerId, Record, Stream, Transport

__all__ = ["Handler", "PeerId", "Record", "Stream", "Transport"]
