"""`noloco manifest check --join`: what this machine could serve in a run, how fast, and what it would give for it.

A stage fits by the checks that a node makes before it takes one; its speed and bytes are those of `--device`, with
this machine and its uplink as they are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bootstrap.checking.costs import FRAMING, link_speed, traffic_of
from bootstrap.checking.devices import measured_here
from bootstrap.checking.report import AssumedLinks, fit_of, speed_of
from bootstrap.inspect.credentials import token_finder
from bootstrap.inspect.observer import Observer, Sighting
from bootstrap.inspect.passing_peer import measured_links, passing_peer
from node.machine.devices import Device
from node.machine.limits import Room, host_room
from node.membership.entry import enter
from node.membership.joining import DIAL_DEADLINE, greet
from node.model.resources import require_disk, require_host_memory, require_memory, room_on
from protocol.errors import JoinError, ResourceError
from protocol.run.manifest import Manifest
from protocol.run.signed_manifest import SignedManifest
from protocol.transport.libp2p import Libp2pConfig

HOUR = 3600.0


@dataclass(frozen=True)
class NamedLinks:
    """Bytes a second that the volunteer names, None for a direction to be measured; else what is `assumed`."""

    upload: float | None
    download: float | None
    assumed: float


@dataclass(frozen=True)
class Resources:
    """What this machine has for a stage: room on its device and in its own memory, and bytes of free disk."""

    device: Device
    room: Room
    host: Room
    disk: int


@dataclass(frozen=True)
class StageInRun:
    """A stage of a run: the replicas that serve it now, and the median of the tokens a second that they tell."""

    stage: int
    replicas: int
    pace: float | None


@dataclass(frozen=True)
class StageHere:
    """A stage on this machine, at its most: whether it fits "whole", "smaller" or "no", and `why` not.

    `computes` and `carries`: tokens a second of the device and of the link; bytes an hour at the lower of the two.
    """

    stage: int
    fits: str
    why: str
    computes: float
    carries: float
    sent: float
    received: float


@dataclass(frozen=True)
class Visit:
    """What was found of a run: its manifest, who serves what, and what can be sent to some members."""

    signed: SignedManifest
    stages: tuple[StageInRun, ...]
    upload: float | None  # bytes a second, of the fastest; None: nobody answered probes
    round_trip: float | None  # seconds, of the nearest


def stage_here(
    manifest: Manifest, stage: int, machine: Resources, links: AssumedLinks, replicas: int
) -> StageHere:
    """Judge one stage, with so many `replicas` of it, this machine among them."""
    why = why_not(manifest, stage, machine)
    speed, traffic = speed_of(manifest, stage, machine.device), traffic_of(manifest, stage, replicas)
    carries = link_speed(traffic, links)
    rate = 0.0 if why else min(speed.tokens_per_second, carries)
    whole = "whole" if fit_of(manifest, stage, machine.device) == "whole" else "smaller"
    return StageHere(
        stage=stage,
        fits="no" if why else whole,
        why=why,
        computes=speed.tokens_per_second,
        carries=carries,
        sent=traffic.sent * FRAMING * rate * HOUR,
        received=traffic.received * FRAMING * rate * HOUR,
    )


def why_not(manifest: Manifest, stage: int, machine: Resources, directory: Path = Path()) -> str:
    """Say why a node here would refuse the stage, as it does at its start; empty when it would take it."""
    on_host = not machine.device.is_gpu
    try:
        require_memory(manifest, stage, machine.room, on_host=on_host)
        if not on_host:
            require_host_memory(manifest, stage, machine.host)
        require_disk(manifest, stage, directory, machine.disk)
    except ResourceError as problem:
        return str(problem)
    return ""


def stages_in_run(manifest: Manifest, seen: Sequence[Sighting]) -> tuple[StageInRun, ...]:
    """Count the replicas of each stage that serve, and take the median of the rates that they tell."""
    found = []
    for stage in range(manifest.stages):
        here = [one for one in seen if one.member.announcement.stage == stage]
        serving = [one for one in here if one.member.announcement.state == "serving"]
        rates = [one.stats.tokens_per_second for one in serving if one.stats and one.stats.tokens_per_second]
        found.append(StageInRun(stage, len(serving), statistics.median(rates) if rates else None))
    return tuple(found)


async def look_at(join: Sequence[str], token: str, *, measures: bool) -> Visit:
    """Get a run's manifest from a member, see who is there, and if it `measures`, the uplink.

    Takes some seconds: `DIAL_DEADLINE`, a greeting, a look at the records, three visits. Raises `JoinError` when
    nobody answers, `TokenError` where the run is private and the token is not for it.
    """
    async with passing_peer(Libp2pConfig(host="0.0.0.0", client_only=True)) as (rpc, key):
        reached = await rpc.transport.connect(join, DIAL_DEADLINE)
        if not reached:
            raise JoinError(
                "\n  ".join(["No peer answered at:", *join])
                + "\nCheck that the address is current and complete, "
                "that the peer runs, and that its TCP port is open."
            )
        greeting = await greet(rpc, rpc.transport, sorted(reached), None)
        signed = greeting.signed
        await enter(rpc, signed, greeting.revoked, token_finder(token), takes_part=False)
        seen = await Observer(rpc.transport, rpc, signed).look()
        serving = [one.member.peer for one in seen if one.member.announcement.state == "serving"]
        measures = measures and not signed.manifest.access.private  # a record would use the token up
        links = await measured_links(rpc, key, signed, serving) if measures else []
    rates = [link.bandwidth for link in links if link.bandwidth]
    return Visit(
        signed,
        stages_in_run(signed.manifest, seen),
        max(rates, default=None),
        min((link.round_trip for link in links), default=None),
    )


def resources_here(manifest: Manifest, threads: int, free_disk: int) -> Resources:
    """Measure this machine for a run. Takes seconds."""
    device = measured_here(manifest, threads)
    where = torch.device("cuda" if device.is_gpu else "cpu")
    return Resources(device, room_on(where), host_room(), free_disk)


def judged(visit: Visit, machine: Resources, links: AssumedLinks) -> list[StageHere]:
    """Judge each stage of the run, with this machine as one more replica of it, and never alone."""
    manifest = visit.signed.manifest
    return [
        stage_here(manifest, each.stage, machine, links, max(2, each.replicas + 1)) for each in visit.stages
    ]


def as_json(
    visit: Visit, machine: Resources, links: AssumedLinks, stages: Sequence[StageHere]
) -> dict[str, object]:
    return {
        "check": "machine",
        "ok": any(stage.fits != "no" for stage in stages),
        "run": visit.signed.run_id,
        "device": asdict(machine.device),
        "upload": links.up(),
        "download": links.down(),
        "upload_is_measured": visit.upload is not None,
        "stages": [asdict(here) | asdict(run) for here, run in zip(stages, visit.stages, strict=True)],
    }
