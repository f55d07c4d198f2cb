"""Leads from an address to the run: reaches a member, learns the manifest, checks the clocks; and answers others.

The manifest also says how large the frames are that a member may get.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

from node.config import NO_ADDRESS, NodeConfig
from node.membership.outside import Told, inner_port, listening_port, outside_addresses
from node.model.fragment import PIECE_PARAMETERS
from node.storage.state_directory import StateDirectory
from node.watch.events import Events
from protocol.errors import ClockError, JoinError, LaterVersion, NolocoError, later
from protocol.files.folders import temporary_folder
from protocol.ground import PeerId
from protocol.messages.peers import Hello, Welcome
from protocol.records.addresses import network_of
from protocol.records.identity import Identity
from protocol.rpc.compatibility import spoken_by, what_to_upgrade
from protocol.rpc.rpc import Answer, Request, Rpc, Traffic
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from protocol.supervision import all_of
from protocol.transport.base import Transport
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

DIAL_DEADLINE = 15.0
GREETINGS = 5  # tries, a second apart
HELLO_DEADLINE = 10.0
GREETED_AT_ONCE = 4
DIAL_BACK_DEADLINE = 1.5  # for a connection to a peer whose connection is there already
PROBE_DEADLINE = 3.0
PROBED_PEERS = 48
SILENT = 1 / 8  # of those asked, at most: they are not waited for until the deadline
ANSWERS = 4.0  # times the longest answer so far: how long, and `LEAST_PATIENCE` seconds at least
LEAST_PATIENCE = 1.0


class NobodyGreets(JoinError):
    """Raised when peers were reached, but none has joined the run so far that it could introduce others."""


def serve_greeting(
    rpc: Rpc,
    transport: Transport,
    signed: SignedManifest,
    *,
    is_seed: bool,
    revoked: Callable[[], bytes] = lambda: b"",
) -> None:
    """Answer newcomers with the manifest, this peer's clock and the list of what the run's owner has `revoked`."""
    raw = signed.to_bytes()

    async def on_hello(request: Request[Hello]) -> Answer[Welcome]:
        role: Literal["seed", "node"] = "seed" if is_seed else "node"
        hello = request.message
        asked, reached = transport.now(), ""
        if hello.port:
            reached = await transport.dial_back(request.peer, hello.port, DIAL_BACK_DEADLINE)
        middle = (asked + transport.now()) / 2  # the asker, too, takes the middle between its two
        return Answer(
            Welcome(
                run_id=signed.run_id, time=middle, role=role, manifest=raw, reached=reached, revoked=revoked()
            )
        )

    rpc.handle(Hello.answered_by(on_hello))


@dataclass(frozen=True)
class Passing:
    """A peer of a new key that comes to ask and goes: it serves nothing."""

    transport: Transport
    rpc: Rpc
    reached: list[PeerId]  # of those it has dialled


@asynccontextmanager
async def passing_by(addresses: Sequence[str], check: str) -> AsyncIterator[Passing]:
    """Dial the addresses as a peer that leaves nothing behind; what to `check` is said if nobody answers.

    Takes `DIAL_DEADLINE` at most. Raises `JoinError`.
    """
    with temporary_folder("noloco-visit-") as directory:
        key = directory / "identity.key"
        Identity.generate().save(key)
        transport = Libp2pTransport(key, Libp2pConfig(host="0.0.0.0", client_only=True))
        rpc = Rpc(transport)
        try:
            await transport.start()
            reached = await transport.connect(addresses, DIAL_DEADLINE)
            if not reached:
                raise later(JoinError("\n  ".join(["No peer answered at:", *addresses]) + f"\n{check}"))
            yield Passing(transport, rpc, sorted(reached))
        finally:
            await rpc.close()
            await transport.close()


@dataclass(frozen=True)
class Greeting:
    signed: SignedManifest
    offset: float  # of this machine's clock in seconds; positive: ahead
    reached: str = ""  # the address at which the greeting peer has dialled this one, see `Hello.port`
    revoked: bytes = b""  # the owner's list as that peer has it, unchecked
    told: tuple[Told, ...] = ()  # the same of all that answered with it


async def greet(
    rpc: Rpc, transport: Transport, peers: Sequence[PeerId], expected_run: str | None, port: int = 0
) -> Greeting:
    """Ask the peers for the manifest, a few at a time; the first usable answer counts.

    With a `port` the peer tries whether it can dial this one there. Who answers with nonsense, another run or a wrong
    clock stops nobody from asking the others. When no answer is usable, raises what was wrong with the first: that
    is `JoinError` when it is of another run than expected, `ClockError` when the clocks differ too much for the DHT,
    `LaterVersion` when a later version founded it,
    else `NobodyGreets`. Takes `HELLO_DEADLINE` for every `GREETED_AT_ONCE` peers at most. May be repeated.
    """
    unusable: list[JoinError | ClockError | LaterVersion] = []
    problems: list[str] = []
    for start in range(0, len(peers), GREETED_AT_ONCE):
        some = peers[start : start + GREETED_AT_ONCE]
        answers = await all_of(*(_hello(rpc, transport, peer, port) for peer in some))
        greetings = [(p, a) for p, a in zip(some, answers, strict=True) if isinstance(a, Greeting)]
        for peer, answer in zip(some, answers, strict=True):
            try:
                if isinstance(answer, NolocoError):
                    raise answer
                _require_same_run(peer, answer.signed.run_id, expected_run)
                _require_same_time(answer.offset, answer.signed.manifest.limits.clock_skew)
            except (JoinError, ClockError, LaterVersion) as problem:
                unusable.append(problem)
            except NolocoError as problem:
                problems.append(f"{peer}: {problem}")
            else:
                of_run = [(p, one) for p, one in greetings if one.signed.run_id == answer.signed.run_id]
                networks = {peer: network_of(addresses) for peer, addresses in await transport.peers()}
                told = tuple(Told(one.reached, networks.get(p, "")) for p, one in of_run)
                return replace(answer, told=told)
    if unusable:
        raise unusable[0]
    for spoken in await all_of(
        *(spoken_by(transport, peer, DIAL_BACK_DEADLINE) for peer in peers[:GREETED_AT_ONCE])
    ):
        if spoken is not None and (sentence := what_to_upgrade(spoken)):
            raise JoinError(f"The peers reached speak another protocol. {sentence}")
    raise later(
        NobodyGreets(
            "The peers reached did not give a usable manifest:\n  " + "\n  ".join(problems) + "\n"
            "Ask the run's owner for the address of another member."
        )
    )


async def _hello(rpc: Rpc, transport: Transport, peer: PeerId, port: int) -> Greeting | NolocoError:
    try:
        asked = transport.now()
        welcome, _ = await rpc.call(peer, Hello(port=port), deadline=HELLO_DEADLINE)
        offset = (asked + transport.now()) / 2 - welcome.time
        signed = SignedManifest.from_bytes(welcome.manifest)
        return Greeting(signed, offset, welcome.reached, welcome.revoked)
    except NolocoError as problem:
        return problem


def _require_same_run(peer: PeerId, run: str, expected: str | None) -> None:
    if expected is not None and run != expected:
        raise JoinError(
            f"Peer {peer} trains run {run}, not {expected}. "
            "Check the --join address, or use another --state-dir for another run."
        )


def _require_same_time(offset: float, limit: float) -> None:
    if abs(offset) > limit:
        direction = "ahead of" if offset > 0 else "behind"
        raise later(
            ClockError(
                f"This machine's clock is {abs(offset):.1f} s {direction} the swarm's; at most {limit:g} s are "
                "allowed. Switch on time synchronisation (Linux: 'timedatectl set-ntp true'; WSL: "
                "'wsl --shutdown', then start again) and retry."
            )
        )


async def silent(rpc: Rpc, peers: list[PeerId]) -> set[PeerId]:
    """Find out which of the peers do not answer: a record outlives its peer by its lifetime.

    Asks a few dozen at most; among more, one death does not change which stage is the smallest.
    """

    loop, asked, alive = asyncio.get_running_loop(), peers[:PROBED_PEERS], set[PeerId]()
    began, left, slowest = loop.time(), len(asked), 0.0

    async def ask(peer: PeerId, limit: asyncio.Timeout) -> None:
        nonlocal left, slowest
        with suppress(NolocoError):
            await rpc.call(peer, Hello(), deadline=PROBE_DEADLINE)
            alive.add(peer)
            slowest = loop.time() - began
        left -= 1
        limit.reschedule(began + patience(len(asked), left, slowest))

    with suppress(TimeoutError):
        async with asyncio.timeout(PROBE_DEADLINE) as limit:
            await all_of(*(ask(peer, limit) for peer in asked))
    return set(asked) - alive


def patience(asked: int, left: int, slowest: float) -> float:
    """Seconds from the question for which the last ones are waited for: not long where most have answered.

    `slowest` is the longest answer so far. Among many one is dead at most times, which all newcomers would wait for.
    """
    is_most = left <= asked * SILENT
    return min(PROBE_DEADLINE, max(LEAST_PATIENCE, ANSWERS * slowest)) if is_most else PROBE_DEADLINE


async def find_run(
    config: NodeConfig, transport: Transport, rpc: Rpc, state: StateDirectory | None, events: Events
) -> Greeting:
    """Reach a member and get the manifest; a returning node may go on alone with the one that it has.

    Raises `JoinError` or `ClockError` with what to do.
    """
    known = state.manifest() if state is not None else None
    book = state.addresses() if state is not None else []
    if not config.join and known is None:
        raise JoinError(NO_ADDRESS)
    addresses = [*config.join, *book]
    events.begin(f"dialling {len(addresses)} address{'es' * (len(addresses) != 1)}")
    reached = await transport.connect(addresses, DIAL_DEADLINE)
    expected = config.run or (known.run_id if known else None)
    if reached:
        events.begin(f"asking {len(reached)} of {len(addresses)} that answered for the run")
        own = transport.addresses()
        port = 0 if config.announce else listening_port(own)
        greeting = await _greeted(rpc, transport, sorted(reached), expected, port, known)
        if greeting is None:
            assert known is not None
            return Greeting(known, 0.0)
        if state is not None:
            state.save_manifest(greeting.signed)
        _tell_of_way(events, greeting, port)
        if inner_port(own) and (outside := outside_addresses(greeting.told, own)):
            await announce_outside(transport, outside, own, events)
        return greeting
    if known is not None:
        events.warn(
            "None of the known peers answers. This node goes on with its saved state and keeps looking.",
            "nobody-reached",
        )
        return Greeting(known, 0.0)
    raise later(
        JoinError(
            "No peer answered at:\n  " + "\n  ".join(config.join) + "\n"
            "Check that the address is complete and current, that the peer runs, and that its TCP port is open "
            "in the firewalls between."
        )
    )


async def _greeted(
    rpc: Rpc,
    transport: Transport,
    peers: list[PeerId],
    expected: str | None,
    port: int,
    known: SignedManifest | None,
) -> Greeting | None:
    """Get the first peer's greeting that has the manifest. Peers that start at this moment get some time.

    A returning node that meets only such peers goes on with its own manifest, and gets None: they may all wait for
    each other.
    """
    for attempt in range(GREETINGS):
        try:
            greeting = await greet(rpc, transport, peers, expected, port)
        except NobodyGreets:
            if known is not None:
                return None
            if attempt == GREETINGS - 1:
                raise
            await asyncio.sleep(1.0)
        else:
            return greeting
    raise AssertionError("the loop returns or raises")


def _tell_of_way(events: Events, greeting: Greeting, port: int) -> None:
    """Say what the first greeting shows of the clock, and of the `port` that the peer tried if it is not 0."""
    sentence = f"This machine's clock is {greeting.offset:+.2f} s beside the swarm's"
    if greeting.reached:
        sentence += f", and a peer dialled it directly at {greeting.reached}"
    events.say(f"{sentence}.", "greeted", ahead=greeting.offset, reached=greeting.reached)
    if port and not greeting.reached:
        events.warn(
            f"A peer could not dial this node back at port {port}: those that it cannot dial, either, reach it only "
            f"through a peer that passes streams on. For the direct way, forward TCP port {port} to this machine, or "
            "open it in its firewall; noloco doctor --join tells more.",
            "not-reachable",
            port=port,
        )


async def announce_outside(transport: Transport, outside: list[str], own: list[str], events: Events) -> None:
    """Let others dial this node where peers say that they have reached it."""
    await transport.announce(outside)
    beside = (
        ", beside this machine's own addresses: a peer says that it"
        if outside[1:]
        else ": peers say that they"
    )
    events.say(
        f"Announcing {outside[0]}{beside} reached this node there. (--announce names another address.)",
        "outside",
        address=outside[0],
        instead_of=own,
    )


def payload_limits(manifest: Manifest) -> dict[Traffic, int]:
    """The largest frame of each class that this run can need, with some room for headers and scales."""
    activations = manifest.tokens_per_microbatch * (manifest.model.hidden_size * 4 + 8)
    logits = manifest.model.vocab_size * 8  # of one token, beside the tokens that they are of
    piece = PIECE_PARAMETERS * 4
    return {
        Traffic.CONTROL: 64 * 1024,
        Traffic.PIPELINE: max(activations, logits) + 64 * 1024,
        Traffic.PAIRING: 64 * 1024,
        Traffic.GOSSIP: 2 * piece + 64 * 1024,
        Traffic.STATE: 4 * piece + 64 * 1024,
    }
