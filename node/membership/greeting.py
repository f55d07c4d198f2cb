"""The first words between peers: which run this is, and whether the clocks agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import ClockError, JoinError, NolocoError
from protocol.messages import Hello, Welcome
from protocol.rpc import Answer, Request, Rpc, Traffic
from protocol.signed_manifest import SignedManifest
from protocol.supervision import all_of
from protocol.transport.base import PeerId, Transport

HELLO_DEADLINE = 10.0
DIAL_BACK_DEADLINE = 1.5  # for a connection to a peer whose connection is there already
PROBE_DEADLINE = 3.0
PROBED_PEERS = 48


class NobodyGreets(JoinError):
    """Peers were reached, but none of them has joined the run so far that it could introduce others."""


def serve_greeting(rpc: Rpc, transport: Transport, signed: SignedManifest, *, is_seed: bool) -> None:
    """Answer newcomers with the manifest and this peer's clock."""
    raw = signed.to_bytes()

    async def on_hello(request: Request) -> Answer:
        role: Literal["seed", "node"] = "seed" if is_seed else "node"
        hello: Hello = request.message
        asked, reached = transport.now(), ""
        if hello.port:
            reached = await transport.dial_back(request.peer, hello.port, DIAL_BACK_DEADLINE)
        middle = (asked + transport.now()) / 2  # the asker, too, takes the middle between its two
        return Answer(Welcome(run_id=signed.run_id, time=middle, role=role, manifest=raw, reached=reached))

    rpc.handle(Traffic.CONTROL, Hello, on_hello)


@dataclass(frozen=True)
class Greeting:
    signed: SignedManifest
    offset: float  # of this machine's clock in seconds; positive: ahead
    reached: str  # the address at which the greeting peer has dialled this one, see `Hello.port`


async def greet(
    rpc: Rpc, transport: Transport, peers: Sequence[PeerId], expected_run: str | None, port: int = 0
) -> Greeting:
    """Ask the peers, one after another, for the manifest; the first valid one counts.

    With a `port` the peer tries whether it can dial this one there. Raises `NobodyGreets` when nobody
    gives a usable one, `JoinError` when it is of another run than expected, `ClockError` when the clocks differ
    too much for the DHT. May be repeated.
    """
    problems: list[str] = []
    for peer in peers:
        try:
            asked = transport.now()
            hello = Hello(port=port)
            welcome, _ = await rpc.call(peer, Traffic.CONTROL, hello, Welcome, deadline=HELLO_DEADLINE)
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
        return Greeting(signed, offset, welcome.reached)
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
    answered = await all_of(*(answers(peer) for peer in asked))
    return {peer for peer, alive in zip(asked, answered, strict=True) if not alive}
