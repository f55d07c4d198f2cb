"""Words while something takes long: nobody looks at a silent screen for more than a few seconds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SILENCE_SECONDS = 3.0  # a word after that and the pace, and what busy cores add: five at the latest
PACE_SECONDS = 1.0  # and not more often than that

Doing = Callable[[], str]  # what is being done now; nothing is said of an empty one

_AFTER_EVENT = {  # what a node does once it has told of this
    "data-open": "rehearsing a step",
    "execution": "getting its weights",
    "initialised": "finding the others",
    "restored": "finding the others",
    "downloaded": "finding the others",
    "serving": "serving",
    "addresses": "serving",
    "step": "training",
}


class StatusLine:
    """Says what goes on while something takes long.

    Mutable state: what is being done, what was said last and when, and the thread that looks every second.

    A thread, since what takes long here, imports above all, holds up an event loop.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began = self._last = clock()
        self._said = ""
        self._doing: Doing = str
        self._ended = threading.Event()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def doing(self, what: Doing | str) -> None:
        """Show this from now on; an empty text shows nothing, while something else is on the screen."""
        self._doing = what if callable(what) else lambda: what
        self._last, self._said = self._clock() - PACE_SECONDS, ""

    def look(self) -> None:
        """Say what is being done when that has changed, or when nothing was said for long."""
        now, text = self._clock(), self._doing()
        pause = SILENCE_SECONDS if text == self._said else PACE_SECONDS
        if text and now - self._last >= pause:
            self._say(f"{now - self._began:4.0f} s  {text}")
            self._last, self._said = now, text

    def __enter__(self) -> StatusLine:
        threading.Thread(target=self._run, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(PACE_SECONDS):
            self.look()


def what_nodes_do(states: Iterable[tuple[str, Path]]) -> str:
    """One line of nodes, each with its name and state directory, those that do the same together."""
    doing: dict[str, list[str]] = {}
    for name, directory in states:
        doing.setdefault(_doing(directory), []).append(name)
    return "; ".join(f"{' '.join(names)} {what}" for what, names in doing.items())


def _doing(directory: Path) -> str:
    """Say what the node does by its last telling event; a line that is not yet complete is skipped."""
    try:
        lines = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "starting"
    for line in reversed(lines):
        try:
            event = json.loads(line)["event"]
        except ValueError:
            continue
        if event in _AFTER_EVENT:
            return _AFTER_EVENT[event]
    return "joining"
