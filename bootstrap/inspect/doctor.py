"""`noloco doctor`: can this machine serve a run, and which step on the way to the others fails?"""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from node.links.links import Links
from node.links.probing import Visitor
from node.machine.limits import host_room, size, tcp_port
from node.membership.discovery import read_stage
from node.membership.joining import HELLO_DEADLINE, greet, payload_limits
from node.membership.view import View
from protocol.addresses import check_address, host_of, peer_id_in
from protocol.announcement import Announcement, stage_key
from protocol.errors import ClockError, NolocoError, UserError
from protocol.ground import PeerId
from protocol.identity import Identity
from protocol.messages.peers import Hello, Introduce
from protocol.records import seal_record
from protocol.rpc import Rpc
from protocol.signed_manifest import SignedManifest
from protocol.supervision import all_of
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport

CONNECT_SECONDS = 5.0
DIAL_SECONDS = 15.0
MOST_DIALLING_BACK = 8
MOST_MEASURED = 3
RECORD_SECONDS = 300.0
LEAST_DISK = 2 << 30  # bytes: what checkpoints and prepared text of a small run take
LEAST_MEMORY = 1 << 30
LEAST_MTU = 1280  # what IPv6 asks of every link; tunnels below it lose large packets
_IP_MTU = 14  # linux/in.h


@dataclass(frozen=True)
class CheckResult:
    """One check: whether it is well (None: it cannot be told, or makes no difference), and a sentence."""

    what: str
    is_well: bool | None
    told: str


# --- this machine ---------------------------------------------------------------------------------


def machine(directory: Path) -> list[CheckResult]:
    """Check memory, disk, GPU, interfaces. Takes a second or two where there is a GPU."""
    return [_memory(), _disk(directory), _gpu(), _mtu()]


def _memory() -> CheckResult:
    room = host_room()
    is_enough = room.free >= LEAST_MEMORY
    advice = "" if is_enough else " Close other programs, or raise the limit."
    return CheckResult("memory", is_enough, f"{size(room.free)} are free{room.described()}.{advice}")


def _disk(directory: Path) -> CheckResult:
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    advice = "" if free >= LEAST_DISK else " Choose --state-dir on another disk."
    return CheckResult("disk", free >= LEAST_DISK, f"{size(free)} are free for the state directory.{advice}")


def _gpu() -> CheckResult:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        driver = _driver()
        return CheckResult("GPU", True, f"{', '.join(names)}{f', driver {driver}' if driver else ''}.")
    if driver := _driver():
        built = torch.version.cuda
        why = (
            f"is made for CUDA {built}, which the driver may be too old for"
            if built
            else "is built for the CPU"
        )
        return CheckResult(
            "GPU", False, f"There is a GPU (driver {driver}), but torch {torch.__version__} {why}."
        )
    return CheckResult("GPU", None, "No NVIDIA GPU: the node would train on the processor.")


def _driver() -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""
    return ""


def _mtu(host: str = "192.0.2.1") -> CheckResult:
    """MTU of the way towards `host`, as far as the kernel knows it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            mtu = probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError:
            return CheckResult(
                "MTU", None, "There is no route to the internet, or this system does not tell."
            )
    advice = "" if mtu >= LEAST_MTU else " Large packets may be lost: raise the MTU of the tunnel."
    return CheckResult("MTU", mtu >= LEAST_MTU, f"{mtu} bytes towards the outside.{advice}")


# --- the way to a run -----------------------------------------------------------------------------


async def network(join: Sequence[str], host: str, port: int) -> AsyncIterator[CheckResult]:
    """Check each step to the run, as a node takes them; ends after the first that fails, whose name is the hop."""
    reachable = []
    for address in join:
        finding = await _tcp(address)
        yield finding
        if finding.is_well:
            reachable.append(address)
    if not reachable:
        return
    try:
        async with _peer(host, port) as (rpc, key):
            reached = await rpc.transport.connect(reachable, DIAL_SECONDS)
            if not reached:
                told = "TCP works, and no peer of that id answers: is the address complete and current?"
                yield CheckResult("libp2p", False, told)
                return
            yield CheckResult("libp2p", True, f"{len(reached)} of {len(reachable)} peers answer.")
            async for finding in _as_visitor(rpc, key, sorted(reached)):
                yield finding
    except UserError as problem:
        yield CheckResult("p2pd", False, str(problem))


async def _tcp(address: str) -> CheckResult:
    """A connection to the port itself, without p2pd."""
    what = "address"
    try:
        check_address(address)
        what, host = "TCP", str(host_of(address))
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


@asynccontextmanager
async def _peer(host: str, port: int) -> AsyncIterator[tuple[Rpc, Identity]]:
    """A peer that listens as a node would, under a key of its own. Raises `UserError`."""
    with TemporaryDirectory(prefix="noloco-doctor-") as directory:
        path = Path(directory) / "identity.key"
        key = Identity.load_or_create(path)
        transport = Libp2pTransport(path, Libp2pConfig(host=host, port=port, relay=True))
        rpc = Rpc(transport)
        try:
            await transport.start()
            await rpc.start()
            yield rpc, key
        finally:
            await rpc.close()
            await transport.close()


async def _as_visitor(rpc: Rpc, key: Identity, reached: Sequence[PeerId]) -> AsyncIterator[CheckResult]:
    try:
        greeting = await greet(rpc, rpc.transport, reached, None)
    except ClockError as problem:
        yield CheckResult("clock", False, str(problem))
        return
    except NolocoError as problem:
        yield CheckResult("greeting", False, str(problem))
        return
    name = greeting.signed.manifest.name
    yield CheckResult("greeting", True, f"They train run '{name}', {greeting.signed.run_id}.")
    yield CheckResult("clock", True, f"{greeting.offset:+.2f} s beside theirs.")
    members = await _members(rpc, greeting.signed, reached)
    yield await _dialled_back(rpc, members)
    yield await _uplink(rpc, key, greeting.signed, members)


async def _members(rpc: Rpc, signed: SignedManifest, reached: Sequence[PeerId]) -> list[PeerId]:
    """The peers that were dialled, and some of the run's nodes."""
    view, transport, run_id = View(), rpc.transport, signed.run_id
    stages = signed.manifest.stages
    rpc.limit(payload_limits(signed.manifest))
    for stage in range(stages):
        await read_stage(transport, run_id, stage, view)
    nodes = [peer for stage in range(stages) for peer in view.serving(stage, transport.now())]
    return list(dict.fromkeys([*nodes, *reached]))


async def _dialled_back(rpc: Rpc, members: Sequence[PeerId]) -> CheckResult:
    addresses = rpc.transport.addresses()
    port = tcp_port(addresses)

    async def ask(peer: PeerId) -> str | None:
        try:
            welcome, _ = await rpc.call(peer, Hello(port=port), deadline=HELLO_DEADLINE)
        except NolocoError:
            return None
        return welcome.reached

    answers = await all_of(*(ask(peer) for peer in members[:MOST_DIALLING_BACK]))
    return reachability(answers, port, any("p2p-circuit" in address for address in addresses))


def reachability(answers: Sequence[str | None], port: int, by_relay: bool) -> CheckResult:
    """Judge the port by answers: the address at which this machine was dialled, "" for none, None for no answer."""
    tried = [answer for answer in answers if answer is not None]
    at = sorted({answer for answer in tried if answer})
    forward = (
        f"Forward TCP port {port} of the router to this machine, open it in the firewall, or name the outside "
        "address with --announce; choose the port with --port."
    )
    if at:
        share = f"{sum(map(bool, tried))} of {len(tried)} peers dialled this machine"
        return CheckResult("port", True, f"{share}, at {', '.join(at)}.")
    if not tried:
        return CheckResult("port", None, "Nobody tried to dial this machine back.")
    if by_relay:
        return CheckResult("port", None, f"Only by relay, which is slow. {forward}")
    return CheckResult("port", False, f"None of {len(tried)} peers could dial this machine back. {forward}")


async def _uplink(rpc: Rpc, key: Identity, signed: SignedManifest, members: Sequence[PeerId]) -> CheckResult:
    """Measure the uplink to members: they answer whoever shows a record, and this one says at once that it leaves."""
    now = rpc.transport.now()
    record = Announcement(stage=0, state="leaving", since=now).to_bytes()
    sealed = seal_record(key, stage_key(signed.run_id, 0), record, now + RECORD_SECONDS)
    rpc.introduction = Introduce(stage=0, record=sealed, expires=now + RECORD_SECONDS)
    links = Links()
    visitor = Visitor(rpc, links, random.Random())
    for peer in members[:MOST_MEASURED]:
        await visitor.visit(peer)
    told = links.told()
    rates = [link.bandwidth for link in told if link.bandwidth]
    if not rates:
        if told:
            return CheckResult(
                "uplink", False, "Small messages pass and large ones do not: look at the MTU of the way."
            )
        return CheckResult("uplink", None, "No member answers probes.")
    trip = min(link.round_trip for link in told)
    return CheckResult(
        "uplink", True, f"{8e-6 * max(rates):.1f} Mbit/s or more, round trip {1e3 * trip:.0f} ms."
    )


# --- what is shown --------------------------------------------------------------------------------


async def examine_machine(join: Sequence[str], directory: Path, host: str, port: int) -> bool:
    """Print each finding as it comes; return whether none is bad."""
    found = await asyncio.to_thread(machine, directory)
    for finding in found:
        print(line(finding), flush=True)
    async for finding in network(join, host, port):
        found.append(finding)
        print(line(finding), flush=True)
    if not join:
        print("With --join ADDRESS the way to a run is checked as well: clock, port, uplink.")
    hops = [finding for finding in found if finding.is_well is False]
    for finding in hops:
        print(f"Not well: {finding.what}.")
    return not hops


def line(finding: CheckResult) -> str:
    mark = {True: "ok", False: "NO", None: "--"}[finding.is_well]
    return f"{mark}  {finding.what:<9} {finding.told}"
