"""`noloco node`: orders to a node that runs on this machine, through the socket that its state directory names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from bootstrap.inspect.node_limits import as_order, kept_by, name_in, told
from bootstrap.inspect.node_orders import ordered, silent
from node.command import App, fail
from node.machine.named import Use
from node.watch.health import STATUS, Report, Unwell, directories, is_of_several, look
from node.watch.words import print_wrapped
from protocol.errors import UserError

PAUSE_PATIENCE = 15.0  # seconds; a node takes ten at most
LOOK_SECONDS = 0.2

app = App(
    no_args_is_help=True,
    help="Pause, resume or end a node here, or change its limits.\n\nExample: noloco node pause",
)

StateDir = Annotated[
    Path,
    Use.READ_FOLDER,
    typer.Option("--state-dir", envvar="NOLOCO_STATE_DIR", help="State directory of the node."),
]
Device = Annotated[str, typer.Option("--device", help="Of several nodes, those on this device, as cuda:1.")]
HERE = Path("noloco-state")


@app.command()
def pause(state_dir: StateDir = HERE, device: Device = "") -> None:
    """Finish what is in flight and give the device's memory back.

    That takes ten seconds at most. The node stays a member of the run, and goes on with `noloco node resume`, where
    it was.

    Example: noloco node pause
    """
    for directory, report in _ordered(state_dir, device, "pause"):
        _tell_cost(report)
        print_wrapped(_paused(directory))


@app.command()
def resume(state_dir: StateDir = HERE, device: Device = "") -> None:
    """Go on after a pause. A limit of the node may still keep it from that.

    Example: noloco node resume
    """
    for _, report in _ordered(state_dir, device, "resume"):
        why = report.get("paused")
        print_wrapped(f"It still rests: {why}" if why else "It takes its stage up again.")


@app.command()
def finish(state_dir: StateDir = HERE, device: Device = "") -> None:
    """Leave the run as with Ctrl-C: finish, save, withdraw.

    Example: noloco node finish
    """
    for directory, report in _ordered(state_dir, device, "finish"):
        _tell_cost(report)
        print_wrapped(f"It leaves; it can be started again with --state-dir {directory}.")


@app.command()
def status(state_dir: StateDir = HERE, device: Device = "") -> None:
    """Show what the node does, how far it is, and its limits.

    Example: noloco node status --state-dir noloco-state
    """
    for _, report in _ordered(state_dir, device, STATUS):
        print_wrapped("\n".join(lines_of(report)))


Rate = Annotated[str | None, typer.Option(help="Such as 20Mbit or 2.5MB/s.", show_default=False)]
Cap = Annotated[str | None, typer.Option(help="Of each month, such as 500GB.", show_default=False)]
Percent = Annotated[str | None, typer.Option(help="Of the time to compute.", show_default=False)]
Degrees = Annotated[str | None, typer.Option(help="Of the device, in °C.", show_default=False)]
Times = Annotated[str | None, typer.Option(help="As 22-07 or 'mon-fri 22-07, sat-sun'.", show_default=False)]
Idle = Annotated[
    bool | None, typer.Option("--only-idle/--no-only-idle", help="Pause while it is in use or on battery.")
]


@app.command()
def limits(
    state_dir: StateDir = HERE,
    device: Device = "",
    max_upload: Rate = None,
    max_download: Rate = None,
    monthly_cap: Cap = None,
    gpu_percent: Percent = None,
    max_temperature: Degrees = None,
    hours: Times = None,
    network_hours: Times = None,
    only_idle: Idle = None,
) -> None:
    """Show the node's limits, or change them at once.

    Each stands beside what it limits; none lifts one. A change holds until the node ends: what keeps it in the
    settings file is printed.

    Example: noloco node limits --max-upload 5Mbit --hours none
    """
    given = {
        "max_upload": max_upload, "max_download": max_download, "monthly_cap": monthly_cap,
        "gpu_percent": gpu_percent, "max_temperature": max_temperature, "hours": hours,
        "network_hours": network_hours, "only_idle": only_idle,
    }  # fmt: skip
    wishes = {name: wish for name, wish in given.items() if wish is not None}
    try:
        order = as_order(wishes, nodes=len(_asked(state_dir, device)))
    except UserError as error:
        fail(error)
    answers = _ordered(state_dir, device, "limits" if wishes else STATUS, {"limits": order})
    for _, report in answers:
        print_wrapped("\n".join(told(report)))
    if wishes:
        is_one = is_of_several(state_dir) or len(answers) < len(directories(state_dir))
        print_wrapped("\n".join(kept_by(wishes, is_one_of_several=is_one)))


def lines_of(report: Report) -> list[str]:
    """Return lines for people: one about the node, and one for each thing that holds it back."""
    where = (
        f", stage {report['stage']}, step {report['step']:,}, round {report['round']:,}"
        if "stage" in report
        else ""
    )
    tokens = f", {report['tokens']:,} tokens" if "tokens" in report else ""
    lines = [f"Node {name_in(report)}: {report.get('state')}{where}{tokens}."]
    if report.get("paused"):
        lines.append(f"It rests: {report['paused']}")
    if report.get("last"):
        lines.append(str(report["last"]))
    limits = (report.get("limits") or {}).items()
    lines += [f"{name}: {of['limit']} ({of['now']})" for name, of in limits if of["limit"]]
    return lines if report.get("healthy") else [*lines, f"Not well: {report.get('reason')}."]


def _tell_cost(report: Report) -> None:
    """Say what the run loses by the order, if this was the last node that had its stage's state."""
    if report.get("last"):
        print_wrapped(report["last"])


def _ordered(
    state_dir: Path, device: str, order: str, said: Mapping[str, Any] = MappingProxyType({})
) -> list[tuple[Path, Report]]:
    """The answer of each node of the directory, or of those on the device.

    Ends the command with a sentence when one does not answer, or does not do it.
    """
    try:
        return ordered(_asked(state_dir, device), order, said)
    except UserError as error:
        fail(error)


def _asked(state_dir: Path, device: str) -> list[Path]:
    """The state directories of the nodes that are meant; ends the command with a sentence when there are none."""
    found = directories(state_dir)
    if not device:
        return found
    try:
        on = {directory: str(look(directory).get("device")) for directory in found}
    except Unwell as silence:
        fail(silent(silence))
    wanted = "cuda:0" if device == "cuda" else device
    asked = [directory for directory in found if on[directory] == wanted]
    if not asked:
        fail(UserError(f"No node of {state_dir} runs on {device}; there are {', '.join(on.values())}."))
    return asked


def _paused(directory: Path) -> str:
    """Wait until the node is paused, `PAUSE_PATIENCE` seconds at most; return a sentence on it."""
    ends = time.monotonic() + PAUSE_PATIENCE
    while (state := look(directory).get("state")) != "paused" and time.monotonic() < ends:
        time.sleep(LOOK_SECONDS)
    if state == "paused":
        return "Paused; the memory of the device is free. Go on with: noloco node resume"
    return f"It pauses as soon as it can; at present it is {state}."
