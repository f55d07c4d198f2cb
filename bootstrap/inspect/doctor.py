"""`noloco doctor`: can this machine serve a run, and which step on the way to the others fails?"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from bootstrap.inspect.credentials import token_finder
from bootstrap.inspect.large_packets import large_packets
from bootstrap.inspect.passing_peer import measured_links, members_of, passing_peer
from bootstrap.inspect.reachability import ask_members, clock, reachability
from node.machine.checkup import (
    CheckResult,
    Interface,
    checks_here,
    gpu,
    interface_towards,
    kernels_driver,
)
from node.machine.limits import tcp_port
from node.membership.entry import TokenSource, enter
from node.membership.joining import greet
from node.process.first_look import towards
from node.watch.words import print_wrapped, wrapped
from protocol.errors import ClockError, NolocoError, TokenError, UserError
from protocol.ground import PeerId
from protocol.records.addresses import check_address, network_of, peer_id_in
from protocol.records.announcement import LinkReport
from protocol.records.identity import Identity
from protocol.rpc.rpc import Rpc
from protocol.supervision import all_of
from protocol.transport.libp2p import Libp2pConfig

CONNECT_SECONDS = 5.0
DIAL_SECONDS = 15.0
NAME_COLUMNS = 9
INDENT = " " * (len("ok  ") + NAME_COLUMNS + 1)  # of a finding's later lines


# --- this machine ---------------------------------------------------------------------------------


def machine(directory: Path, towards: str) -> list[CheckResult]:
    """Check memory, disk, limits, interface, GPU. Takes a second or two where there is a GPU."""
    return [*checks_here(directory, towards), _gpu()]


def _gpu() -> CheckResult:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return gpu(
        names if torch.cuda.is_available() else [],
        kernels_driver() or _driver(),
        torch.__version__,
        torch.version.cuda,
    )


def _driver() -> str:
    """As nvidia-smi tells it, for systems whose kernel does not (WSL)."""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""
    return ""


# --- the way to a run -----------------------------------------------------------------------------


async def network(
    join: Sequence[str], host: str, port: int, token: TokenSource = ""
) -> AsyncIterator[CheckResult]:
    """Check each step to the run, as a node takes them; ends after the first that fails, whose name is the hop.

    `token` is for a private run. Raises `TokenError` where that lets nobody in.
    """
    answering, reachable = [], []
    for address in join:
        finding = await _tcp(address)
        yield finding
        if finding.is_well:
            answering.append(address)
    ways = await all_of(*(_way(address) for address in answering))
    for address, way in zip(answering, ways, strict=True):
        if way is None or way.is_well:
            reachable.append(address)
        if way is not None:
            yield way
    if not reachable:
        return
    try:
        # as a node would, which asks the home router to forward its port, too
        config = Libp2pConfig(host=host, port=port, nat_port_map=True)
        async with passing_peer(config) as (rpc, key):
            reached = await rpc.transport.connect(reachable, DIAL_SECONDS)
            if not reached:
                told = (
                    "TCP works, and no peer of that id answers: is the address complete and current? If it is, large "
                    "packets may be lost on the way here: try an MTU of 1280."
                )
                yield CheckResult("libp2p", False, told)
                return
            yield CheckResult("libp2p", True, f"{len(reached)} of {len(reachable)} peers answer.")
            async for finding in _as_visitor(
                rpc, key, sorted(reached), interface_towards(towards(reachable)), token
            ):
                yield finding
    except TokenError:
        raise
    except UserError as problem:
        yield CheckResult("p2pd", False, str(problem))


async def _way(address: str) -> CheckResult | None:
    near = interface_towards(towards([address]))
    return await large_packets(_host_in(address), tcp_port([address]), near)


def _host_in(address: str) -> str:
    return address.split("/")[2]


async def _tcp(address: str) -> CheckResult:
    """A connection to the port itself, without p2pd."""
    what = "address"
    try:
        check_address(address)
        what, host = "TCP", _host_in(address)
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, tcp_port([address]))
        writer.close()
    except UserError as problem:
        return CheckResult(what, False, str(problem))
    except TimeoutError:
        told = f"{address} says nothing: a firewall is between, or the machine is off. Try another member's address."
        return CheckResult(what, False, told)
    except OSError as error:
        told = f"{address}: {error.strerror or error}. Does the peer run, and is its port mapped?"
        return CheckResult(what, False, told)
    return CheckResult(what, True, f"…{peer_id_in(address)[-8:]} can be reached at {host}.")


async def _as_visitor(
    rpc: Rpc,
    key: Identity,
    reached: Sequence[PeerId],
    near: Interface | None,
    token: TokenSource,
) -> AsyncIterator[CheckResult]:
    try:
        greeting = await greet(rpc, rpc.transport, reached, None)
    except ClockError as problem:
        yield CheckResult("clock", False, str(problem))
        return
    except NolocoError as problem:
        yield CheckResult("greeting", False, str(problem))
        return
    signed = greeting.signed
    yield CheckResult("greeting", True, f"They train run '{signed.manifest.name}', {signed.run_id}.")
    await enter(rpc, signed, greeting.revoked, token, takes_part=False)
    if signed.manifest.access.private:
        yield CheckResult("token", True, "The members let this machine in.")
    _, members = await members_of(rpc, signed, reached)
    answers = await ask_members(rpc, members)
    yield clock(answers, greeting.offset, signed.manifest.limits.clock_skew)
    port = tcp_port(rpc.transport.addresses())
    dialled = [None if answer is None else answer.reached for answer in answers]
    places = await rpc.transport.remotes()
    tried = [peer for peer, one in zip(members, answers, strict=False) if one is not None]
    networks = {network_of(places.get(peer, ())) for peer in tried}
    seen = await rpc.transport.seen_by(tried)
    yield reachability(dialled, port, near, seen, len(networks - {""}))
    if signed.manifest.access.private:  # a record would use the token up
        yield CheckResult(
            "uplink", None, "Not measured: in a private run members answer probes of members alone."
        )
    else:
        yield uplink(await measured_links(rpc, key, signed, members))


def uplink(measured: Sequence[LinkReport]) -> CheckResult:
    """Judge what was measured of the links to some members."""
    rates = [link.bandwidth for link in measured if link.bandwidth]
    if not measured:
        return CheckResult("uplink", None, "No member answers probes.")
    if not rates:
        told = "Small messages pass and large ones do not: look at the MTU of the way."
        return CheckResult("uplink", False, told)
    trip = min(link.round_trip for link in measured)
    return CheckResult(
        "uplink", True, f"{8e-6 * max(rates):.1f} Mbit/s or more, round trip {1e3 * trip:.0f} ms."
    )


# --- what is shown --------------------------------------------------------------------------------


async def examine_machine(join: Sequence[str], token: str, directory: Path, host: str, port: int) -> bool:
    """Print each finding as it comes; return whether none is bad. Raises as `network`."""
    found = await asyncio.to_thread(machine, directory, towards(join))
    for finding in found:
        print(wrapped(line(finding), sys.stdout, INDENT), flush=True)
    async for finding in network(join, host, port, token_finder(token, [directory])):
        found.append(finding)
        print(wrapped(line(finding), sys.stdout, INDENT), flush=True)
    if not join:
        print_wrapped("With --join ADDRESS the way to a run is checked as well: clock, port, uplink.")
    hops = dict.fromkeys(finding.what for finding in found if finding.is_well is False)
    for what in hops:
        print_wrapped(f"Not well: {what}.")
    return not hops


def line(finding: CheckResult) -> str:
    mark = {True: "ok", False: "NO", None: "--"}[finding.is_well]
    return f"{mark}  {finding.what:<{NAME_COLUMNS}} {finding.told}"
