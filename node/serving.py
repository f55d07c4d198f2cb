"""One process of a node: what it opens before it joins, in which order, and closes when it ends."""

from __future__ import annotations

import random

import torch

from node.config import NodeConfig
from node.daemon import Node
from node.machine.limits import port_is_free, require_port
from node.machine.processes import PATIENCE, on_interrupt
from node.membership.joining import NO_ADDRESS
from node.membership.outside import announced
from node.model.compute import Compute, ComputeThread
from node.model.pretrained import Pretrained
from node.model.state_directory import StateDirectory
from node.node_resources import Surroundings
from node.several import devices_of, run_several
from node.watch.events import Events, JsonLines, set_up_logging
from node.watch.health import health_served
from node.watch.trace import NO_TRACE, Trace, TraceFile
from protocol.errors import JoinError, UserError
from protocol.transport.libp2p import Libp2pConfig, Libp2pTransport


async def start(config: NodeConfig) -> None:
    """One node, or one for each of several devices."""
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
        compute=lambda stage: make_compute(config, trace),
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


def make_compute(config: NodeConfig, trace: Trace) -> Compute:
    return ComputeThread(config.threads or torch.get_num_threads(), trace)


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
