"""Words while something takes long: nobody looks at a silent screen for more than a few seconds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from node.watch.waiting import WaitingLine

PACE_SECONDS = 1.0  # from one look to the next

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

    Mutable state: what is being done and how far it is, and the thread that looks every second.

    A thread, since what takes long here, imports above all, holds up an event loop.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        rewrite: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rewrite` shows a line in place on a terminal; without it `say` gets a line now and then."""
        self._line = WaitingLine((lambda _: None) if rewrite else say, rewrite, clock)
        self._clock = clock
        self._began = clock()
        self._doing: Doing = str
        self._detail: Doing = str
        self._lock = threading.Lock()  # a look that comes late shows nothing of what is over
        self._ended = threading.Event()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def doing(self, what: Doing | str, detail: Doing = str) -> None:
        """Show this from now on, and how far it is; an empty text shows nothing, while others use the screen."""
        with self._lock:
            self._doing, self._detail = what if callable(what) else lambda: what, detail
            if not what:
                self._line.clear()

    def look(self) -> None:
        """Show what is being done, see `WaitingLine`."""
        with self._lock:
            what = self._doing()
            if not what:
                self._line.clear()
                return
            detail = self._detail()
            line = f"{self.elapsed:4.0f} s  {what}{detail and ': '}{detail}"
            self._line.show(what, lambda _: line)

    def __enter__(self) -> StatusLine:
        threading.Thread(target=self._run, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.doing("")

    def _run(self) -> None:
        while not self._ended.wait(PACE_SECONDS):
            self.look()


class LineInPlace:
    """The last line of a terminal, written anew at each call; what is printed meanwhile stands above it.

    Mutable state: the view of rich while there is a line.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def __call__(self, line: str) -> None:
        """Show the line; an empty one takes it away, so that something else may be drawn."""
        if not line:
            if self._live is not None:
                self._live.stop()
                self._live = None
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


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
