"""`noloco node`: orders to a node that runs on this machine, through the socket that its state directory names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from node.command import App, fail
from node.watch.health import STATUS, Report, Unwell, directories, look
from protocol.errors import UserError

PAUSE_PATIENCE = 15.0  # seconds; a node takes ten at most
LOOK_SECONDS = 0.2

app = App(
    no_args_is_help=True,
    help="Pause, resume or end a node that runs on this machine, or ask how it is.\n\nExample: noloco node pause",
)

StateDir = Annotated[
    Path, typer.Option("--state-dir", envvar="NOLOCO_STATE_DIR", help="State directory of the node.")
]
HERE = Path("noloco-state")


@app.command()
def pause(state_dir: StateDir = HERE) -> None:
    """Finish what is in flight and give the device's memory back, within ten seconds.

    The node stays a member of the run, and goes on with `noloco node resume`, where it was.

    Example: noloco node pause
    """
    for directory, _ in _ordered(state_dir, "pause"):
        print(_paused(directory))


@app.command()
def resume(state_dir: StateDir = HERE) -> None:
    """Go on after a pause. A limit that the node was started with may still keep it from that.

    Example: noloco node resume
    """
    for _, report in _ordered(state_dir, "resume"):
        why = report.get("paused")
        print(f"It still rests: {why}" if why else "It takes its stage up again.")


@app.command()
def finish(state_dir: StateDir = HERE) -> None:
    """Leave the run as with Ctrl-C: finish what is in flight, save, withdraw.

    Example: noloco node finish
    """
    for directory, _ in _ordered(state_dir, "finish"):
        print(f"It leaves; it can be started again with --state-dir {directory}.")


@app.command()
def status(state_dir: StateDir = HERE) -> None:
    """What the node does, how far it is, and the limits that its volunteer set.

    Example: noloco node status --state-dir noloco-state
    """
    for _, report in _ordered(state_dir, STATUS):
        print("\n".join(lines_of(report)))


def lines_of(report: Report) -> list[str]:
    """Return lines for people: one about the node, and one for each thing that holds it back."""
    where = (
        f", stage {report['stage']}, step {report['step']:,}, round {report['round']:,}"
        if "stage" in report
        else ""
    )
    tokens = f", {report['tokens']:,} tokens" if "tokens" in report else ""
    lines = [f"Node …{str(report.get('peer'))[-8:]}: {report.get('state')}{where}{tokens}."]
    if report.get("paused"):
        lines.append(f"It rests: {report['paused']}")
    lines += [f"{name}: {value}" for name, value in (report.get("limits") or {}).items()]
    return lines if report.get("healthy") else [*lines, f"Not well: {report.get('reason')}."]


def _ordered(state_dir: Path, order: str) -> list[tuple[Path, Report]]:
    """The answer of each node of the directory; ends the command with a sentence when one does not answer."""
    try:
        answers = [(directory, look(directory, order=order)) for directory in directories(state_dir)]
    except Unwell as silence:
        fail(UserError(f"There is nothing to talk to: {silence}. Name the state directory with --state-dir."))
    for _, report in answers:
        if "refused" in report:
            fail(
                UserError(
                    f"The node does not do that: {report['refused']}. Start it again with this version."
                )
            )
    return answers


def _paused(directory: Path) -> str:
    """Wait until the node is paused, `PAUSE_PATIENCE` seconds at most; return a sentence on it."""
    ends = time.monotonic() + PAUSE_PATIENCE
    while (state := look(directory).get("state")) != "paused" and time.monotonic() < ends:
        time.sleep(LOOK_SECONDS)
    if state == "paused":
        return "Paused; the memory of the device is free. Go on with: noloco node resume"
    return f"It pauses as soon as it can; at present it is {state}."
