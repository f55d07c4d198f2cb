"""How often others may probe this node. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from protocol.messages import MAX_PROBE_BYTES
from protocol.transport.base import PeerId

WINDOW_SECONDS = 8.0  # shorter than the pause that every prober makes between two visits
# of a visit: two that open streams, three round trips, two with a payload, and one to spare
MOST_PROBES = 8
MOST_BYTES = 2 * MAX_PROBE_BYTES
MOST_PROBERS = 256  # that are remembered; who was forgotten gets a fresh window


@dataclass
class _Window:
    began: float
    probes: int = 0
    nbytes: int = 0


class ProbeAllowance:
    """Mutable state: what each of the last probers has asked for in its window."""

    def __init__(self) -> None:
        self._windows: OrderedDict[PeerId, _Window] = OrderedDict()

    def allows(self, peer: PeerId, nbytes: int, now: float) -> bool:
        """Count a probe with `nbytes` of payload; whether it is answered."""
        window = self._windows.get(peer)
        if window is None or now - window.began >= WINDOW_SECONDS:
            window = self._windows[peer] = _Window(now)
            self._windows.move_to_end(peer)
            if len(self._windows) > MOST_PROBERS:
                self._windows.popitem(last=False)
        window.probes += 1
        window.nbytes += nbytes
        return window.probes <= MOST_PROBES and window.nbytes <= MOST_BYTES and nbytes <= MAX_PROBE_BYTES
