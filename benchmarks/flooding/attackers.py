"""Peers that send malformed frames as quickly as they can: identities with a p2pd of their own each, in one process.

None waits to be accepted, and each connects again whenever its connection was ended. Run as a program it prints a
line of JSON each half second: `ready`, then frames `offered` and `sent`, and `opened` streams, until frames or
seconds are over. It then gives way to others on the cores of this machine, which would not be theirs elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import uvloop
from flooding.grammar import KINDS, batch_of

from protocol.errors import NolocoError
from protocol.ground import PeerId
from protocol.messages import Traffic
from protocol.records.addresses import peer_id_in
from protocol.records.identity import Identity
from protocol.supervision import Supervisor
from protocol.transport.p2pd import Libp2pConfig, P2pd

ALL = tuple(KINDS)
WRITERS = 4  # of each identity
BATCH = 32  # frames of one stream
DEADLINE = 10.0  # seconds for a stream or a connection
ENDING = 0.5  # seconds in which a victim may answer, before the stream is given up
STARTED_AT_ONCE = 4
PAUSE = 0.1
NICENESS = 5  # more than this program was started with
_CHUNK = 1 << 16


class Attacker:
    """One identity. Mutable state: its p2pd, and what it has sent to each victim."""

    def __init__(self, identity: Identity, kinds: tuple[str, ...] = ALL) -> None:
        self.peer_id = identity.peer_id
        self.sent = Counter[PeerId]()  # frames
        self.opened = 0
        self.offered = 0  # frames of all streams, also of those that ended before anything was taken
        self._identity = identity
        self._kinds = kinds
        self._rng = random.Random(self.peer_id)

    async def start(self, folder: Path, supervisor: Supervisor) -> None:
        key = folder / f"{self.peer_id}.key"
        self._identity.save(key)
        self._p2pd = await P2pd.start(key, Libp2pConfig(client_only=True), supervisor)

    async def stop(self) -> None:
        await self._p2pd.stop()

    async def flood(
        self, victims: Sequence[str], batch: int = BATCH, may_go: Callable[[], bool] = lambda: True
    ) -> None:
        """Until it is cancelled, but only while it may."""
        await asyncio.gather(*(self._write_on(victims, writer, batch, may_go) for writer in range(WRITERS)))

    async def _write_on(
        self, victims: Sequence[str], writer: int, batch: int, may_go: Callable[[], bool]
    ) -> None:
        for turn in range(writer, 1 << 62):
            await once(may_go)
            with suppress(NolocoError, OSError, EOFError, RuntimeError, TimeoutError):
                await self.send(victims[turn % len(victims)], batch)
            await asyncio.sleep(0)

    async def send(self, victim: str, batch: int) -> None:
        """So many frames on one stream. Raises what the network does."""
        peer, traffic = peer_id_in(victim), self._rng.choice(list(Traffic))
        frames = batch_of(self._rng, traffic.value, self._kinds, batch)
        control = self._p2pd.control
        try:
            stream = await control.open_stream(peer, traffic.protocol, DEADLINE)
        except NolocoError:
            await control.connect(victim, peer, DEADLINE)
            stream = await control.open_stream(peer, traffic.protocol, DEADLINE)
        self.opened += 1
        self.offered += len(frames)
        try:
            stream.write(b"".join(frames))
            await stream.drain()
            self.sent[peer] += len(frames)
            if self._rng.random() < 0.5:  # else whatever was not sent yet is lost with the stream
                async with asyncio.timeout(ENDING):
                    while True:
                        await stream.readexactly(_CHUNK)
        finally:
            stream.close()


async def started(count: int, folder: Path, supervisor: Supervisor) -> list[Attacker]:
    """So many attackers with fresh identities."""
    attackers = [Attacker(Identity.generate()) for _ in range(count)]
    room = asyncio.Semaphore(STARTED_AT_ONCE)

    async def start(attacker: Attacker) -> None:
        async with room:
            await attacker.start(folder, supervisor)

    await asyncio.gather(*map(start, attackers))
    return attackers


async def once(condition: Callable[[], bool]) -> None:
    """Returns when it holds; other processes make it so."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(PAUSE)


def give_way() -> None:
    """All threads of this process and of its children, which have been started as quickly as can be."""
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


def tell(**row: object) -> None:
    print(json.dumps(row), flush=True)


async def attack(
    victims: Sequence[str],
    identities: int,
    frames: int,
    seconds: float,
    is_even: bool,
    go: Callable[[], bool],
) -> None:
    """Begins once it may `go`, and is gone when it may no longer.

    `is_even`: what is offered is spread over all of the seconds, also what a victim does not take.
    """
    supervisor = Supervisor()
    with tempfile.TemporaryDirectory(prefix="noloco-flood-") as folder:
        attackers = await started(identities, Path(folder), supervisor)
        tell(ready=len(attackers), peers=[attacker.peer_id for attacker in attackers])
        await once(go)
        give_way()
        began, sent = time.monotonic(), 0

        def may_go() -> bool:
            due = frames * (time.monotonic() - began) / seconds
            return not is_even or sum(attacker.offered for attacker in attackers) < due

        floods = [supervisor.start(attacker.flood(victims, may_go=may_go)) for attacker in attackers]
        offered = 0
        while (offered if is_even else sent) < frames and time.monotonic() < began + seconds and go():
            await asyncio.sleep(0.5)
            sent = sum(attacker.sent.total() for attacker in attackers)
            opened, offered = (sum(getattr(a, name) for a in attackers) for name in ("opened", "offered"))
            tell(sent=sent, opened=opened, offered=offered)
        for task in floods:
            task.cancel()
        await asyncio.wait(floods)
        tell(done=sent)
        await once(lambda: not go())  # until what it took was read
        for attacker in attackers:
            await attacker.stop()
        await supervisor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victims", nargs="+", required=True)
    parser.add_argument("--identities", type=int, required=True)
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--even", action="store_true")
    parser.add_argument("--go", type=Path, required=True, help="a file that says so while it is there")
    given = parser.parse_args()
    amount = given.identities, given.frames, given.seconds
    uvloop.run(attack(given.victims, *amount, given.even, given.go.exists))


if __name__ == "__main__":
    main()
