"""`noloco diagnose`: one file for a bug report, in which all is replaced that is not known to be harmless."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bootstrap.display import require_places, write_whole
from bootstrap.inspect.observer import visit
from bootstrap.inspect.redacting import Redactor
from bootstrap.inspect.status import Watching, as_json
from node.machine.cores import cores
from node.machine.limits import host_room
from node.storage.state_directory import StateDirectory
from node.watch.health import Unwell, directories, look
from node.watch.words import print_wrapped
from protocol.errors import NolocoError, TokenError
from protocol.files.folders import user_name
from protocol.version import own_version

PACKAGES = (
    "torch",
    "hivemind",
    "numpy",
    "numba",
    "pydantic",
    "msgpack",
    "uvloop",
    "tokenizers",
    "safetensors",
)
LAST_EVENTS, LAST_LINES = 500, 300
TAIL_BYTES = 4 << 20  # of a file that is read for its end
LONGEST = 2_000  # letters of a line
ADVICE = "Name another file with --out."


async def diagnose(state_dir: Path, join: Sequence[str], token: str, out: Path) -> None:
    """Write what is known of this machine, of the nodes whose state is in `state_dir`, and of the run by `join`.

    Says what is in it. Raises `StateError` when the file cannot be written; what cannot be found out is in the file
    as a sentence. A run that does not let this visitor in is told after that, too: raises `TokenError`. Deadlines:
    those of `visit` and of a survey.
    """
    require_places(out, advice=ADVICE)
    nodes = [_node(place) for place in directories(state_dir)]
    found: dict[str, Any] = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "machine": _machine(state_dir),
        "nodes": nodes,
        "run": "not looked at: no --join",
    }
    refused = None
    if join:
        found["run"], refused = await _run(join, token, state_dir)
    facts = {name: found.pop(name) for name in ("written", "versions", "machine")}  # nobody chose their words
    redactor = Redactor([*_names_in(found), socket.gethostname(), user_name(), *join])
    redacted = {name: redactor.of(part) for name, part in found.items()}
    text = json.dumps(facts | redacted, indent=1, ensure_ascii=False)
    write_whole(out, text + "\n", ADVICE, mode=0o600)
    _tell(out, len(text.encode(errors="backslashreplace")), nodes, redactor)
    if refused is not None:
        raise refused


def _tell(out: Path, size: int, nodes: Sequence[dict[str, Any]], redactor: Redactor) -> None:
    print_wrapped(f"Wrote {out} ({size / 1000:,.0f} kB), which has:")
    print_wrapped("  the versions of this program and of what it uses, and what this machine is")
    for node in nodes:
        events, lines = len(node["events"]), len(node["log"])
        print_wrapped("  what a node keeps of itself, its manifest, how its parts are,")
        print_wrapped(f"  its last {events:,} events and {lines:,} lines of its log")
    print_wrapped("  the run as `noloco status` sees it, if --join named a member")
    counts = [f"{times:,} × {kind}" for kind, times in sorted(redactor.replaced.items())]
    print_wrapped(
        f"Replaced by numbers: {', '.join(counts) or 'nothing'}. No weights, text or keys are in it."
    )
    print_wrapped(
        "Read it before you send it: a name that is a word of this program, such as Mark, may still be there."
    )


def _versions() -> dict[str, str]:
    known = {"noloco-node": own_version(), "python": sys.version}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def _machine(state_dir: Path) -> dict[str, Any]:
    import torch

    place = next(folder for folder in (state_dir, *state_dir.absolute().parents) if folder.exists())
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",  # the rest may be a person's word
        "processor": platform.machine(),
        "cores": cores(),
        "memory_left": host_room().free,
        "disk_left": shutil.disk_usage(place).free,
        "gpus": gpus,
        "environment": sorted(
            name for name in os.environ if name.startswith(("NOLOCO_", "OMP_"))
        ),  # not to what
    }


def _node(directory: Path) -> dict[str, Any]:
    state = StateDirectory(directory)
    return {
        "health": _or_why(lambda: look(directory)),
        "facts": _or_why(state.facts),
        "manifest": _or_why(lambda: _manifest(state)),
        "events": [_event(line) for line in last_lines(directory / "events.jsonl", LAST_EVENTS)],
        "log": list(last_lines(directory / "node.log", LAST_LINES)),
    }


def _manifest(state: StateDirectory) -> Any:
    signed = state.manifest()
    return "none kept" if signed is None else signed.manifest.model_dump(mode="json")


def _or_why(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns, or a sentence on why it cannot."""
    try:
        return ask()
    except (NolocoError, Unwell, OSError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"


def _event(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line


def last_lines(file: Path, most: int) -> Iterator[str]:
    """The last lines of a text file, shortened; none where there is none, or it may not be read."""
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - TAIL_BYTES))
            kept = deque(lines.read(TAIL_BYTES).decode(errors="replace").splitlines(), most)
    except OSError:
        return
    yield from (line[:LONGEST] for line in kept)


async def _run(join: Sequence[str], token: str, state_dir: Path) -> tuple[Any, TokenError | None]:
    """The run as `noloco status` sees it, or why it is not seen; and the error, where it lets this visitor not in."""
    try:
        async with visit(join, token, [state_dir]) as observer:
            return as_json(await Watching(observer).look(is_first=True)), None
    except NolocoError as problem:
        return f"{type(problem).__name__}: {problem}", problem if isinstance(problem, TokenError) else None


def _names_in(found: dict[str, Any]) -> Iterator[str]:
    """The names that people gave to the run and their nodes."""
    run = found["run"]
    if isinstance(run, dict):
        yield run["run"]["name"]
        yield from (node["name"] for node in run["nodes"] if isinstance(node.get("name"), str))
    for node in found["nodes"]:
        for part in (node["manifest"], node["facts"], *node["events"]):
            if isinstance(part, dict) and isinstance(part.get("name"), str):
                yield part["name"]
