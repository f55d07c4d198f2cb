"""One kind of malformed frame again and again, under the virtual clock: the stranger that sends it is banned."""

from __future__ import annotations

import asyncio
import random

import pytest
from flooding.grammar import KINDS, batch_of

from bootstrap.lab.in_memory.memory import MemoryTransport
from protocol.errors import NolocoError
from protocol.records.identity import Identity
from protocol.rpc.rpc import Traffic
from tests.unit.test_door import a_door, requests
from tests.unit.two_peers import in_virtual_time, say_done

MOST_FRAMES = 100  # until the ban
PAUSE = 0.02  # seconds between two
CLASSES = {
    "body nests": Traffic.CONTROL,
    "garbage body": Traffic.STATE,
    "garbage body of members": Traffic.PAIRING,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_sends_one_kind_again_and_again_is_banned(kind: str) -> None:
    """Before: never for kinds that there are not, halves of frames, what is cancelled unasked, and garbage that only
    members may send."""

    @in_virtual_time
    async def main() -> None:
        async with a_door() as two:
            two.server.handle(*(request.answered_by(say_done) for request in requests()))
            mallory = MemoryTransport(two.network, Identity.from_seed("mallory"))
            await mallory.start()
            traffic = CLASSES.get(kind, Traffic.PIPELINE)
            rng, sent = random.Random(kind), 0
            while not two.server.is_banned(mallory.peer_id):
                (frame,) = batch_of(rng, traffic.value, (kind,), 1)
                assert sent < MOST_FRAMES
                try:
                    stream = await mallory.open(two.address, traffic.protocol, 5.0)
                    await stream.write(frame)
                    sent += 1
                    await asyncio.sleep(PAUSE)
                    stream.close()
                except NolocoError:
                    await asyncio.sleep(PAUSE)
            await mallory.close()

    main()
