"""The first words between peers: which run this is, and whether the clocks agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from protocol.errors import ClockError, JoinError, NolocoError
from protocol.manifest import SignedManifest
from protocol.messages import Hello, Welcome
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.transport.base import PeerId, Transport

HELLO_DEADLINE = 10.0
PROBE_DEADLINE = 3.0
PROBED_PEERS = 48


class NobodyGreets(JoinError):
    """Peers were reached, but none of them has joined the run so far that it could introduce others."""


def serve_greeting(rpc: Rpc, transport: Transport, signed: SignedManifest, *, is_seed: bool) -> None:
    """Answer newcomers with the manifest and this peer's clock."""
    raw = signed.to_bytes()

    async def on_hello(request: Request) -> Answer:
        role: Literal["seed", "node"] = "seed" if is_seed else "node"
        return Answer(Welcome(run_id=signed.run_id, time=transport.now(), role=role, manifest=raw))

    rpc.handle(Traffic.CONTROL, Hello, on_hello)


async def greet(
    rpc: Rpc, transport: Transport, peers: Sequence[PeerId], expected_run: str | None
) -> tuple[SignedManifest, float]:
    """Ask the peers, one after another, for the manifest; the first valid one counts.

    Returns it with this machine's clock offset in seconds (positive: ahead). Raises `NobodyGreets` when nobody
    gives a usable one, `JoinError` when it is of another run than expected, `ClockError` when the clocks differ
    too much for the DHT. May be repeated.
    """
    problems: list[str] = []
    for peer in peers:
        try:
            asked = transport.now()
            welcome, _ = await rpc.call(peer, Traffic.CONTROL, Hello(), Welcome, deadline=HELLO_DEADLINE)
            offset = (asked + transport.now()) / 2 - welcome.time
            signed = SignedManifest.from_bytes(welcome.manifest)
        except NolocoError as problem:
            problems.append(f"{peer}: {problem}")
            continue
        if expected_run is not None and signed.run_id != expected_run:
            raise JoinError(
                f"Peer {peer} trains run {signed.run_id}, not {expected_run}. "
                "Check the --join address, or use another --state-dir for another run."
            )
        _require_same_time(offset, signed.manifest.limits.clock_skew)
        return signed, offset
    raise NobodyGreets(
        "The peers reached did not give a usable manifest:\n  " + "\n  ".join(problems) + "\n"
        "Ask the run's owner for the address of another member."
    )


def _require_same_time(offset: float, limit: float) -> None:
    if abs(offset) > limit:
        direction = "ahead of" if offset > 0 else "behind"
        raise ClockError(
            f"This machine's clock is {abs(offset):.1f} s {direction} the swarm's; at most {limit:g} s are "
            "allowed. Switch on time synchronisation (Linux: 'timedatectl set-ntp true'; WSL: "
            "'wsl --shutdown', then start again) and retry."
        )


async def silent(rpc: Rpc, peers: list[PeerId]) -> set[PeerId]:
    """Which of the peers do not answer: a record outlives its peer by its lifetime.

    Asks a few dozen at most; among more, one death does not change which stage is the smallest.
    """

    async def answers(peer: PeerId) -> bool:
        try:
            await rpc.call(peer, Traffic.CONTROL, Hello(), Welcome, deadline=PROBE_DEADLINE)
        except NolocoError:
            return False
        return True

    asked = peers[:PROBED_PEERS]
    answered = await asyncio.gather(*(answers(peer) for peer in asked))
    return {peer for peer, alive in zip(asked, answered, strict=True) if not alive}
