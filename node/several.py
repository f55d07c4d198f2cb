"""Several devices of one machine: a node for each, in a process of its own, started and ended by one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from node.config import ENVIRONMENT_PREFIX, NodeConfig
from node.machine.processes import Children, on_interrupt
from protocol.errors import UserError
from protocol.supervision import all_of


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
