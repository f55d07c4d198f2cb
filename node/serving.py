"""A node's process: what it opens before it joins, in which order, and closes when it ends.

With several devices there is a node for each, in a process of its own, started and ended by one command.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence

import torch

from node.config import ENVIRONMENT_PREFIX, NodeConfig
from node.daemon import Node
from node.machine.limits import port_is_free, require_port
from node.machine.processes import PATIENCE, Children, on_interrupt
from node.membership.joining import NO_ADDRESS
from node.membership.outside import announced
from node.model.compute import ComputeThread
from node.model.pretrained import Pretrained
from node.model.state_directory import StateDirectory
from node.node_resources import Surroundings
from node.watch.events import Events, JsonLines, set_up_logging
from node.watch.health import health_served
from node.watch.trace import NO_TRACE, TraceFile
from protocol.errors import JoinError, UserError
from protocol.supervision import all_of
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport


async def start(config: NodeConfig) -> None:
    devices = devices_of(config.device)
    if len(devices) > 1:
        await run_several(config, devices)
    else:
        await serve(config.model_copy(update={"device": devices[0]}))


async def serve(config: NodeConfig) -> None:
    """Run one node until it is told to leave. Raises `UserError` with what to do when it cannot."""
    config = config.model_copy(update={"device": choose_device(config.device)})
    if config.from_checkpoint:
        Pretrained(config.from_checkpoint)  # a mistyped path is told before anybody is dialled
    state = StateDirectory(config.state_dir)
    if not config.join and not state.exists():
        raise JoinError(NO_ADDRESS)
    trace = TraceFile(config.trace) if config.trace is not None else NO_TRACE
    state.open()
    set_up_logging(config.verbose, state.path / "node.log")
    identity = state.identity()
    transport = Libp2pTransport(state.identity_path, transport_config(config, state))
    lines = JsonLines(state.path / "events.jsonl")
    surroundings = Surroundings(
        transport=transport,
        compute=lambda stage: ComputeThread(config.threads or torch.get_num_threads(), trace),
        events=Events(transport.now, lines),
        rng=random.Random(int.from_bytes(identity.public_key[:8], "big") ^ random.getrandbits(64)),
        state=state,
        trace=trace,
        rehearses=True,
    )
    daemon = Node(config, surroundings)
    on_interrupt(lambda number: daemon.stop(PATIENCE[number]))
    try:
        async with health_served(state.path, daemon.health):
            await daemon.run()
    finally:
        trace.close()
        lines.close()
        state.close()


def choose_device(device: str) -> str:
    """Resolve "auto"; raises `UserError` for a device that this machine does not have."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"The device '{device}' cannot be used here ({str(error).splitlines()[0]}). Try --device cpu."
        ) from None
    return device


def transport_config(config: NodeConfig, state: StateDirectory) -> Libp2pConfig:
    """The network's settings. A returning node listens where it did before, if that port is free."""
    port = config.port
    require_port(config.host, port)
    if not port:
        before = state.facts().get("port", 0)
        port = before if isinstance(before, int) and before and port_is_free(config.host, before) else 0
    return Libp2pConfig(
        host=config.host,
        port=port,
        announce=announced(config.announce, port),
        relay=config.relay,
        nat_port_map=config.relay,
    )


def devices_of(setting: str) -> list[str]:
    """The devices that `--device` names: "all", or a list as cuda:0,cuda:1. One alone stays as it is."""
    if setting == "all":
        gpus = torch.cuda.device_count()
        return [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
    devices = [device.strip() for device in setting.split(",")]
    if not all(devices):
        raise UserError(f"--device {setting!r} has an empty name in it. Write it as cuda:0,cuda:1, or all.")
    return devices


def config_of(config: NodeConfig, index: int, device: str) -> NodeConfig:
    """The settings of one of several nodes: a state directory, a port and a trace of its own."""
    changes: dict[str, object] = {"device": device, "state_dir": config.state_dir / f"device-{index}"}
    if config.port:
        changes["port"] = config.port + index
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
    nodes = Children()
    on_interrupt(nodes.interrupt)
    try:
        for index, device in enumerate(devices):
            arguments = arguments_of(config_of(config, index, device))
            await nodes.start(device, [sys.executable, "-m", "node.cli", *arguments], environment=outside)
        codes = await all_of(*(node.process.wait() for node in nodes.all))
    finally:
        nodes.kill()
    failed = [node.name for node, code in zip(nodes.all, codes, strict=True) if code]
    if failed:
        raise UserError(
            f"The node on {', '.join(failed)} failed; what it said is above, and in its node.log."
        )


def arguments_of(config: NodeConfig) -> list[str]:
    """The flags that give these settings again."""
    arguments = []
    for name, value in config.model_dump().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            arguments += [f"--{flag}={entry}" for entry in value]
        elif value is not None and value != "":
            arguments.append(f"--{flag}={value}")
    return arguments
