"""What a round trip over shaped links takes, seen from one peer, while others use them.

    python round_trips.py 10.78.0.2 10.78.0.3 …

A link is as long as it was told and a little longer: its relay has its turns, and shares the cores with the peers.
Who compares these with a model gives the model what was measured. A round trip is a connection to a port that nobody
listens on: the other's kernel refuses it, whatever its programs do. Once a second until its input ends, all in turn;
then it prints their median in seconds.
"""

from __future__ import annotations

import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

_CLOSED_PORT = 9  # that of discard
_PAUSE = 1.0  # seconds
_DEADLINE = 5.0  # seconds


class RoundTrips:
    """A context manager: probes from behind `prefix`, as `ShapedLinks.prefix` gives it, until `median` is asked."""

    def __init__(self, prefix: list[str], addresses: list[str]) -> None:
        self._command = [*prefix, sys.executable, "-S", str(Path(__file__)), *addresses]

    def __enter__(self) -> RoundTrips:
        self._probe = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probe.kill()
        self._probe.communicate()

    def median(self) -> float:
        """Seconds of those until now, which are the last."""
        told, _ = self._probe.communicate(timeout=2 * _DEADLINE)
        return float(told)


def _round_trip(address: str) -> float | None:
    """Seconds; None where no answer came."""
    began = time.monotonic()
    try:
        socket.create_connection((address, _CLOSED_PORT), _DEADLINE).close()
    except ConnectionRefusedError:
        return time.monotonic() - began
    except OSError:
        pass
    return None


def main() -> None:
    addresses, seen = sys.argv[1:], list[float]()
    for address in addresses:
        _round_trip(address)  # asks for the other's hardware address first, which is a round trip more
    while not select.select([sys.stdin], [], [], _PAUSE)[0]:
        seen += [seconds for address in addresses if (seconds := _round_trip(address)) is not None]
    print(statistics.median(seen) if seen else "nan")


if __name__ == "__main__":
    main()
