"""Runs a node's process: what it opens before it joins, in which order, and closes when it ends.

With several devices there is a node for each, in a process of its own, started and ended by one command.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial

import torch

from node.config import NodeConfig, arguments_of
from node.giving.limit_watch import LimitWatch, Senses
from node.giving.limits import LIMITS, of_one_node
from node.giving.line import Line
from node.giving.policy import VolunteerLimits
from node.machine.accelerator import has_mps
from node.machine.checkup import checks_here
from node.machine.cores import cores
from node.machine.duty import Duty
from node.machine.environment import ENVIRONMENT_PREFIX
from node.machine.limits import parse_rate, parse_share
from node.machine.processes import PATIENCE, Children, on_interrupt
from node.membership.outside import announced
from node.model.compute import ComputeThread
from node.model.pretrained import Pretrained
from node.model.resources import memory_of
from node.process.daemon import Node
from node.process.dashboard_process import dashboard_beside, own_addresses
from node.process.first_look import tell_of_machine, towards
from node.process.steering import Steering
from node.service.node_resources import Surroundings
from node.service.telling import Teller
from node.storage.state_directory import StateDirectory
from node.watch.events import Events, JsonLines, set_up_logging
from node.watch.health import health_served
from node.watch.phases import Phases
from node.watch.screen import Screen
from node.watch.time_use import TimeUse
from node.watch.trace import NO_TRACE, TraceFile
from protocol.errors import MEND, NolocoError, UserError, later
from protocol.ground import PeerId
from protocol.supervision import all_of
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport
from protocol.transport.ports import port_is_free


async def start(config: NodeConfig, phases: Phases, screen: Screen | None = None) -> None:
    devices = devices_of(config.device)
    if len(devices) > 1:
        phases.drop()
        if screen is not None:  # the nodes share the terminal
            screen.close()
        await run_several(config, devices)
    else:
        await serve(config.model_copy(update={"device": devices[0]}), phases, screen)


async def serve(config: NodeConfig, phases: Phases, screen: Screen | None = None) -> None:
    """Run one node until it is told to leave. Raises `UserError` with what to do when it cannot."""
    asked, device = config, choose_device(config.device)
    config = config.model_copy(update={"device": device, "max_memory": limit_on(device, config.max_memory)})
    if config.from_checkpoint:
        Pretrained(config.from_checkpoint)  # a mistyped path is told before anybody is dialled
    state = StateDirectory(config.state_dir)
    trace = TimeUse(TraceFile(config.trace) if config.trace is not None else NO_TRACE)
    state.open()
    set_up_logging(config.verbose, state.path / "node.log", screen)
    teller = Teller(asked, state, trace, phases, screen)
    identity = state.identity()
    network = transport_config(config, state, identity.peer_id)
    transport = Libp2pTransport(state.identity_path, network)
    lines = JsonLines(state.path / "events.jsonl")
    limits, duty = VolunteerLimits.of(config), Duty(config.gpu_percent / 100)
    senses = Senses(limits, torch.device(config.device))
    surroundings = Surroundings(
        transport=transport,
        compute=lambda stage: ComputeThread(
            threads_for(config.threads), trace, duty, torch.device(config.device)
        ),
        events=Events(transport.now, lines, phases),
        rng=random.Random(int.from_bytes(identity.public_key[:8], "big") ^ random.getrandbits(64)),
        state=state,
        trace=trace,
        makes_dry_run=True,
        teller=teller,
    )
    daemon = Node(config, surroundings)
    watch = LimitWatch(
        limits,
        senses,
        Line(state, transport, datetime.now().astimezone()),
        duty,
        daemon.rest,
        surroundings.events,
    )
    steering = Steering(daemon, watch)
    on_interrupt(partial(leave_by_signal, daemon))

    def joined_at() -> list[str]:
        is_known = daemon.knows_run and (daemon.member.ways is None or daemon.member.ways.has_looked.is_set())
        return own_addresses(transport, network.port, network.host) if is_known else []

    page = dashboard_beside(
        config.dashboard,
        joined_at,
        surroundings.events.warn,
        lambda: config.token or state.token(),
        state.path,
    )
    tell_of_machine(surroundings.events, checks_here(state.path, towards(config.join)))
    has_failed = False
    try:
        async with health_served(state.path, steering.report, steering.orders()), page:
            await watch.begin(daemon.supervisor)
            await daemon.run()
    except NolocoError:
        has_failed = True
        raise
    finally:
        watch.close()
        teller.end(daemon.service, has_failed=has_failed)
        trace.close()
        lines.close()
        state.close()


def leave_by_signal(daemon: Node, number: signal.Signals) -> bool:
    """Have the node leave; returns False where it asks first, since somebody sits at a terminal who can answer."""
    return daemon.stop(PATIENCE[number], asks=number == signal.SIGINT and sys.stdin.isatty())


def threads_for(setting: int) -> int:
    """The threads of `--threads`; else torch's own choice, which knows no quota, unless fewer cores may be used."""
    return setting or min(torch.get_num_threads(), cores())


def choose_device(device: str) -> str:
    """The device with its index, which some of torch's functions ask for; "auto" is a GPU where there is one: CUDA
    first, then Apple's.

    Raises `UserError` for a device that this machine does not have.
    """
    if device == "auto":  # takes no memory: whoever asks may only start nodes
        return "cuda:0" if torch.cuda.is_available() else "mps:0" if has_mps() else "cpu"
    try:
        return str(torch.empty(1, device=device).device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"The device '{device}' cannot be used here ({str(error).splitlines()[0]}). Try --device cpu."
        ) from None


def limit_on(device: str, max_memory: str) -> str:
    """Convert a share of the memory to bytes of that device's; the rest as it is."""
    share = parse_share(max_memory)
    return max_memory if share is None else str(int(share * memory_of(torch.device(device), int(1 / share))))


def transport_config(config: NodeConfig, state: StateDirectory, own: PeerId) -> Libp2pConfig:
    """The network's settings. A returning node listens where it did before, if that port is free."""
    port = config.port
    if not port:
        before = state.facts().get("port", 0)
        if isinstance(before, int) and 0 < before < 2**16 and port_is_free(config.host, before):
            port = before
    return Libp2pConfig(
        host=config.host,
        port=port,
        announce=announced(config.announce, port, own),
        nat_port_map=config.relay,
        upload=parse_rate(config.max_upload) if config.max_upload else 0.0,
        download=parse_rate(config.max_download) if config.max_download else 0.0,
    )


def devices_of(setting: str) -> list[str]:
    """The devices that `--device` names: "all", or a list as cuda:0,cuda:1. One alone stays as it is."""
    if setting == "all":
        gpus = torch.cuda.device_count()
        return [f"cuda:{index}" for index in range(gpus)] or [choose_device("auto")]
    devices = [device.strip() for device in setting.split(",")]
    if not all(devices):
        raise UserError(f"--device {setting!r} has an empty name in it. Write it as cuda:0,cuda:1, or all.")
    return devices


def share_on(devices: Sequence[str], device: str) -> str:
    """The `--max-memory` of a node whose GPU others of these share, each of which would take all that is free."""
    siblings = sum(gpu_of(other) == gpu_of(device) for other in devices)
    return f"{100 / siblings:.4g}%" if device.startswith("cuda") and siblings > 1 else ""


def gpu_of(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def config_of(config: NodeConfig, index: int, devices: Sequence[str]) -> NodeConfig:
    """The settings of one of several nodes: a state directory, a port, a trace, parts of a GPU and of the network."""
    changes: dict[str, object] = {
        "device": devices[index],
        "state_dir": config.state_dir / f"device-{index}",
        "max_memory": config.max_memory or share_on(devices, devices[index]),
        "panel": False,  # several would fight for one terminal
    }
    changes |= of_one_node({name: getattr(config, name) for name in LIMITS}, len(devices))
    if config.port:
        changes["port"] = config.port + index
    if index:
        changes["dashboard"] = ""  # one page shows the whole run
    if config.trace is not None:
        changes["trace"] = config.trace.with_stem(f"{config.trace.stem}-{index}")
    return config.model_copy(update=changes)


async def run_several(config: NodeConfig, devices: Sequence[str]) -> None:
    """Run a node on each device until all have ended. Ctrl-C asks all to leave, a second one ends them at once.

    One that ends early leaves the others running. Raises `UserError` in the end if one failed.
    """
    if config.announce:
        raise UserError(
            "--announce names one address, and several devices are several nodes. Start them one by one."
        )
    outside = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    if config.token:
        outside[f"{ENVIRONMENT_PREFIX}TOKEN"] = config.token
    nodes = Children()
    on_interrupt(nodes.interrupt)
    try:
        for index, device in enumerate(devices):
            arguments = arguments_of(config_of(config, index, devices))
            await nodes.start(device, [sys.executable, "-m", "node.cli", *arguments], environment=outside)
        codes = await all_of(*(node.process.wait() for node in nodes.all))
    finally:
        nodes.kill()
    failed = [node.name for node, code in zip(nodes.all, codes, strict=True) if code]
    if failed:
        problem = UserError(
            f"The node on {', '.join(failed)} failed; what it said is above, and in its node.log."
        )
        raise problem if MEND in codes else later(problem)
