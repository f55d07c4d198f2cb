"""The traces of several nodes as one file. They share a machine, hence a clock: their rows line up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from protocol.errors import StateError

FILE_NAME = "trace.json"  # of a node, in its state directory


def require_writable(path: Path) -> None:
    """Make the file, empty. Raises `StateError`: better before the training than after it."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise StateError(
            f"Cannot write the trace {path} ({error.strerror}). Make sure that its folder exists and is yours, "
            "or choose another file with --trace."
        ) from None


def merge_traces(processes: Mapping[str, int], directory: Path, into: Path) -> int:
    """Copy the events of all nodes, one at a time, to one file; returns how many.

    `processes` has the number of each node's process, by the node's name, which becomes the process's label. Raises
    `StateError` when the file cannot be written; the nodes' own files stay where they are.
    """
    count = 0
    try:
        with into.open("w", encoding="utf-8") as target:
            separator = "[\n"
            for name, process in processes.items():
                label = {"ph": "M", "name": "process_labels", "pid": process}
                labelled = json.dumps(label | {"args": {"labels": name}})
                for event in chain([labelled], _events(directory / name / FILE_NAME)):
                    target.write(separator + event)
                    separator = ",\n"
                    count += 1
            target.write("\n]\n")
    except OSError as error:
        raise StateError(
            f"Cannot write the trace {into} ({error.strerror}). The nodes' own are complete, and can be opened: "
            f"{directory}/*/{FILE_NAME}"
        ) from None
    return count


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace, whether its node ended by itself or was killed."""
    for line in _events(path):
        yield json.loads(line)


def _events(path: Path) -> Iterator[str]:
    """The whole events of a file, as text; nothing when there is no file."""
    if not path.exists():  # the node ended before it began to trace
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith(",\n"):
                yield line[:-2]
            elif _is_whole(line):  # the last one, which a kill may have cut
                yield line.rstrip()


def _is_whole(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
