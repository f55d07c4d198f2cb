"""What a node says of its link to another one, in its record and in its numbers."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

PEER_CHARACTERS = 16  # the end of a peer id: 93 bits of its key, too many to look for one that ends alike
MOST_PUBLISHED = 8  # links in a record, of some 45 bytes each
MOST_TOLD = 64  # links told to whoever asks

PeerEnd = Annotated[str, Field(min_length=PEER_CHARACTERS, max_length=PEER_CHARACTERS)]
RoundTrip = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Uncertainty = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
AT_LEAST = 1.0  # an uncertainty of this or more: the link is at least as fast as is said


class LinkReport(NamedTuple):
    """One direction: from the node that says it to `peer`. Travels as an array."""

    peer: PeerEnd
    round_trip: RoundTrip  # seconds, of a small message and its answer
    bandwidth: Bandwidth | None = None  # bytes per second; None: not measured
    uncertainty: Uncertainty = 0.0  # standard deviation of the bandwidth's logarithm


PublishedLinks = Annotated[list[LinkReport], Field(max_length=MOST_PUBLISHED)]
ToldLinks = Annotated[list[LinkReport], Field(max_length=MOST_TOLD)]
