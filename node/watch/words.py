"""Numbers, times and a wait as people read them."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING

from protocol.errors import legible
from protocol.windows import short

if TYPE_CHECKING:
    from protocol.messages.peers import Awaited, LossBest

MOST_LETTERS = 20  # of a word that a stranger wrote
LONGEST_NAME = 32  # letters that a record has room for
_TO_COPY = re.compile(r"^ {4}|/ip[46]/|/dns[46]?/|noloco (?:join (?:/|--(?!help))|generate )")
LATEST = 253_000_000_000.0  # wall clock, in the year 9987: no calendar goes on much longer


def duration(seconds: float) -> str:
    """ "0.3 s", "32 s", "4.2 min", "1.5 h", "2.5 days"; "-" for none."""
    if seconds == 0:
        return "-"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.1f} days"


def count(number: float) -> str:
    """Three digits and what they count: "950", "12,400", "1.24 million", "30.1 billion"."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}" if number < 1e3 * unit else f"{number / unit:,.0f} {name}"
    return f"{number:,.0f}"


def wrapped(text: str, stream: IO[str], later: str = "") -> str:
    """Break the lines of a text between words where `stream` is a terminal, which would break them anywhere.

    A line with a command or an address stays whole, so that it can be copied. `later` begins all but the first.
    """
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return f"\n{later}".join(part for line in text.split("\n") for part in _broken(line, columns, later))


def print_wrapped(text: str, *, on_error: bool = False) -> None:
    """Print a text for people on standard output, or on standard error; see `wrapped`."""
    stream = sys.stderr if on_error else sys.stdout
    print(wrapped(text, stream), file=stream, flush=True)


def _broken(line: str, columns: int, later: str) -> list[str]:
    if len(line) <= columns or _TO_COPY.search(line):
        return [line]
    return textwrap.wrap(line, columns - len(later), break_long_words=False, break_on_hyphens=False)


def amount(number: float) -> str:
    """Two digits or all before the point: "0.18", "0.6", "5.2", "116", "1,234"."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}" if number >= 1e-4 else f"{number:.0e}"


def ago(seconds: float) -> str:
    """ "3 min ago", "2.5 h ago"; "just now" below a second."""
    return "just now" if seconds < 1 else f"{duration(seconds)} ago".replace(".0 ", " ")


def clock_time(time: float, now: float) -> str:
    """A wall clock as this machine's users read it: "13:55", or "28 Nov 13:55" where it is not the day of `now`.

    Any number will do; what no calendar has counts as the nearest that it has.
    """
    day, today = (
        datetime.fromtimestamp(max(0.0, min(each, LATEST)), UTC).astimezone() for each in (time, now)
    )
    date = "" if day.date() == today.date() else f"{day.day} {day:%b} "
    year = "" if abs(day.year - today.year) < 2 else f"{day.year} "
    return f"{date}{year}{day:%H:%M}"


def jump_sentence(loss: float, best: LossBest, now: float) -> str:
    """ "loss 5.21, was 3.62 at 13:55"."""
    return f"loss {loss:.2f}, was {best.loss:.2f} at {clock_time(best.time, now)}"


def missing_sentence(missing: Sequence[int]) -> str:
    """ "Missing before anything is trained: stage 0." """
    need = f"stage {missing[0]}" if len(missing) == 1 else f"stages {', '.join(map(str, missing))}"
    return f"Missing before anything is trained: {need}."


def word(told: str, most: int = MOST_LETTERS) -> str:
    """The text that a stranger wrote in place of a word or two, for one line of a terminal."""
    return " ".join(legible(told).split())[:most]


def called(name: str, peer: str) -> str:
    """The name that a node's volunteer gave it and the end of its key, which nobody else can have; or that alone."""
    shown = word(name, LONGEST_NAME)
    return f"{shown} ({short(peer)})" if shown else short(peer)


def called_among(names: Iterable[tuple[str, str]], peer: str) -> str:
    """Name a peer among (peer id, name) of many: its name alone where no other peer has the same.

    A peer that gives no name, or is not among them, gets the end of its key.
    """
    of_peer, others = "", set[str]()
    for each, name in names:
        shown = word(name, LONGEST_NAME)
        if each == peer:
            of_peer = shown
        else:
            others.add(shown.casefold())
    is_alone = of_peer and of_peer.casefold() not in others
    return of_peer if is_alone else called(of_peer, peer)


def waiting_sentence(awaited: Awaited, now: float, name: Callable[[str], str] = short) -> str:
    """Name the state that a first replica waits for, its holder, and the end of the wait; `now` is the wall clock."""
    holder = name(awaited.peer) if awaited.peer else "a peer"
    return (
        f"Stage {awaited.stage} was at step {awaited.step:,}; {holder} had it {ago(now - awaited.seen)}. "
        f"Waiting for it until {clock_time(awaited.until, now)}; begin anew with --begin-anew."
    )
