"""`noloco-node` that counts the frames which it begins to read of each peer, and writes how many when it bans one.

Lines of JSON in `bans.jsonl` of its state directory: `peer`, `frames`, whether it is `banned`, and the `time`. Also
one for each hundred frames of a peer that is not banned meanwhile: members send thousands.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from node import cli
from protocol.access.peer_limits import Bans
from protocol.ground import PeerId
from protocol.rpc import channel
from protocol.rpc.frames import UNWATCHED, FrameWatch, Prefix, read_prefix
from protocol.transport.base import Stream

BANS_FILE = "bans.jsonl"
NOTED = 100  # frames
read = Counter[PeerId]()


def _note(peer: PeerId, banned: bool) -> None:
    place = Path(sys.argv[sys.argv.index("--state-dir") + 1]) / BANS_FILE
    with place.open("a") as file:
        row = {"peer": peer, "frames": read[peer], "banned": banned, "time": time.time()}
        file.write(json.dumps(row) + "\n")


async def _counted(stream: Stream, watch: FrameWatch = UNWATCHED) -> Prefix:
    prefix = await read_prefix(stream, watch)
    read[stream.remote] += 1
    if read[stream.remote] % NOTED == 0:
        _note(stream.remote, banned=False)
    return prefix


class CountingBans(Bans):
    def strike(self, peer: PeerId, now: float) -> bool:
        begins = super().strike(peer, now)
        if begins:
            _note(peer, banned=True)
            del read[peer]
        return begins


if __name__ == "__main__":
    from protocol.rpc import rpc

    channel.read_prefix = _counted  # type: ignore[attr-defined]
    rpc.Bans = CountingBans  # type: ignore[misc, attr-defined]
    cli.main()
