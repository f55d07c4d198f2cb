"""The device's temperature, who else uses the machine, and whether it runs on a battery.

Where that cannot be told, the volunteer is told so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from node.machine.limits import optional
from protocol.errors import UserError

IDLE_SECONDS = 300.0  # without a key or a movement of the mouse: nobody is at the machine
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal")
COMMAND_SECONDS = 5.0
TERMINALS = Path("/dev")
POWER = Path("/sys/class/power_supply")
ON_BATTERY = "The machine runs on its battery."


def thermometer(device: torch.device) -> Callable[[], float | None]:
    """Gives °C of the device. Raises `UserError` when this machine does not tell them."""
    if device.type == "cuda":
        optional("pynvml", "gpu")
        return lambda: float(torch.cuda.temperature(device))
    if _processor_temperature() is None:
        raise UserError(
            f"This machine does not tell how hot its {device.type} is. Leave out --max-temperature, or limit the "
            "share of the time that it computes with --gpu-percent."
        )
    return _processor_temperature


def _processor_temperature() -> float | None:
    sensors: dict[str, list[Any]] = getattr(psutil, "sensors_temperatures", dict)()  # not on all systems
    degrees = [entry.current for name in PROCESSOR_SENSORS for entry in sensors.get(name, [])]
    return max(degrees, default=None)


def others(device: torch.device) -> str:
    """A sentence about who or what else needs the machine, empty for nobody. Who cannot be told counts as somebody.

    Its battery comes first, see `battery`.

    Looked at are programs that compute on the same GPU, and when a key was last pressed at each terminal and each
    graphical session (Linux: the terminals' access times and logind's idle hint; macOS: the input system's).
    """
    if told := battery():
        return told
    if device.type == "cuda":
        optional("pynvml", "gpu")
        listed = set(map(int, re.findall(r"process\s+(\d+)", torch.cuda.list_gpu_processes(device))))
        if are_others(listed, os.getpid(), torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
            return "Another program computes on the GPU."
    return somebody(time.time())


def battery() -> str:
    """Say in a sentence that the machine runs on its battery, or on that of a UPS; empty when it does not.

    Where nothing tells, as in most containers, there is none. Those of mice and the like do not count.
    """
    if sys.platform == "darwin":
        return ON_BATTERY if "'Battery Power'" in _said("pmset", "-g", "batt") else ""
    supplies = [_supply(folder) for folder in sorted(POWER.glob("*"))]
    of_machine = [supply for supply in supplies if supply.get("scope") != "Device"]
    is_plugged_in = any(
        supply.get("online") == "1" for supply in of_machine if supply.get("type") != "Battery"
    )
    discharges = any(supply.get("status") == "Discharging" for supply in of_machine)
    return ON_BATTERY if discharges and not is_plugged_in else ""


def _supply(folder: Path) -> dict[str, str]:
    """What Linux tells of a power supply (its ABI/testing/sysfs-class-power), as far as it can be read."""
    told = {}
    for name in ("type", "scope", "online", "status"):
        with suppress(OSError, UnicodeDecodeError):
            told[name] = (folder / name).read_text(encoding="utf-8").strip()
    return told


def are_others(listed: set[int], own: int, computes_here: bool) -> bool:
    """Return whether other programs are among those that the driver lists.

    The driver numbers them as the machine does, also for a container with numbers of its own: there one of them is
    this one, once it computes.
    """
    if own in listed or not computes_here:
        return bool(listed - {own})
    return len(listed) > 1


def somebody(now: float) -> str:
    """Say in a sentence who is at the machine at this wall-clock time; empty when nobody is."""
    if sys.platform == "darwin":
        return "" if _mac_idle() >= IDLE_SECONDS else "Somebody is at the machine."
    for user in psutil.users():
        last = _last_input(user.terminal or "")
        if last is None and _session_is_idle(user.name):
            continue
        if last is None or now - last < IDLE_SECONDS:
            return f"{user.name} is at the machine."
    return ""


def _last_input(terminal: str) -> float | None:
    """The time of the last typing at a terminal; None for what is no terminal, such as a graphical session."""
    try:
        return (TERMINALS / terminal).stat().st_atime if terminal and not terminal.startswith(":") else None
    except OSError:
        return None


def _session_is_idle(user: str) -> bool:
    """Return whether logind calls all graphical sessions of the user idle, and there is one."""
    told = [
        _said("loginctl", "show-session", session, "--property=Name,Type,IdleHint") for session in _sessions()
    ]
    graphical = [
        said for said in told if f"Name={user}\n" in said and re.search(r"Type=(x11|wayland|mir)", said)
    ]
    return bool(graphical) and all("IdleHint=yes" in said for said in graphical)


def _sessions() -> list[str]:
    lines = _said("loginctl", "list-sessions", "--no-legend", "--no-pager").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _mac_idle() -> float:
    found = re.search(r'"HIDIdleTime" = (\d+)', _said("ioreg", "-c", "IOHIDSystem"))
    return int(found[1]) / 1e9 if found else 0.0


def _said(*command: str) -> str:
    """The output of a command of the system; empty when it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
