"""A limit on lines of a log a minute: what peers do, over and over, neither fills the disk nor hides what matters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from protocol.windows import window

MINUTE = 60.0
MOST_ALIKE = 20  # lines a minute; a node that trains logs ten at most, of all kinds
MOST = 100  # lines a minute of all kinds together, warnings and below
MOST_KINDS = 256  # remembered at a time; those beyond it are one kind
MOST_TOLD = 5  # kinds of which the lines left out are told one by one
_LONGEST = 160  # characters of a line that is shown as an example

Kind: TypeAlias = tuple[str, str]  # the logger, and the message before anything is filled in
_OTHERS: Kind = ("", "")


@dataclass
class _Count:
    """Lines of one kind in this minute, those left out of them, and the first of these."""

    shown: int = 0
    left_out: int = 0
    example: str = ""


class LineLimit(logging.Filter):
    """Limits a handler's lines; it then also says how many it left out: a minute after the first, with the next.

    What is below INFO is for developers, who have asked for all of it. Mutable state: the counts of this minute.
    """

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts elapsed seconds."""
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._began = clock()
        self._shown = 0  # of warnings and below
        self._counts: dict[Kind, _Count] = {}

    @window
    def __repr__(self) -> str:
        return f"Kinds: {len(self._counts)} | Lines: {self._shown} shown this minute"

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of lines that came in this minute and are remembered."""
        return list(self._counts)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or record.name == __name__:
            return True
        if self._clock() - self._began >= MINUTE:
            self._begin_again()
        count = self._count_of(record)
        is_grave = record.levelno > logging.WARNING
        if count.shown >= MOST_ALIKE or (self._shown >= MOST and not is_grave):
            count.left_out += 1
            count.example = count.example or _first_line(record)
            return False
        count.shown += 1
        self._shown += not is_grave
        return True

    def _count_of(self, record: logging.LogRecord) -> _Count:
        # asyncio says in the first line what happened, and in the others to whom
        kind = record.name, str(record.msg)[:_LONGEST].partition("\n")[0]
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = _OTHERS
        return self._counts.setdefault(kind, _Count())

    def _begin_again(self) -> None:
        counts, self._counts = self._counts, {}
        self._began, self._shown = self._clock(), 0
        left_out = sorted((c for c in counts.values() if c.left_out), key=lambda count: -count.left_out)
        for count in left_out[:MOST_TOLD]:
            self._tell(f"… and {count.left_out} more like it: {count.example}")
        if rest := sum(count.left_out for count in left_out[MOST_TOLD:]):
            self._tell(f"… and {rest} more of other kinds")

    def _tell(self, sentence: str) -> None:
        self._handler.handle(logging.LogRecord(__name__, logging.WARNING, "", 0, sentence, None, None))


def _first_line(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()[:_LONGEST].partition("\n")[0]
    except (TypeError, ValueError):  # its parts do not fit together, which the handler would tell
        return str(record.msg)[:_LONGEST]
