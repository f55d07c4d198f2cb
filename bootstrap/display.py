"""The displays of commands beside plain text: tables, progress bars on a terminal, pictures in a file."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from node.machine.limits import optional
from node.watch.words import wrapped
from protocol.errors import StateError, UserError
from protocol.files.keeping import FOR_OTHERS, advice_for, replace_whole, require_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console


def plain_table(
    title: str, headings: Iterable[str] = (), left: Collection[str] = (), is_dense: bool = False
) -> Table:
    """A table without lines, its title on the left. Columns are right-justified, except those named in `left`.

    A dense one has many columns, which stand closer together and never wrap.
    """
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1 if is_dense else 2, 0, 0))
    table.header_style = "bold underline" if is_dense else "underline"
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=is_dense)
    return table


def say(console: Console, *lines: str, later: str = "") -> None:
    """Print lines as they are, broken between words where the terminal has no room; see `wrapped`."""
    for line in lines:
        told = wrapped(line, console.file, later)
        console.print(told, soft_wrap=True, highlight=False, markup=False)


class Bars:
    """Progress bars on a terminal, one for each name.

    Mutable state: one progress bar for each name.
    """

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._shown.add_task(name, total=total)
        self._shown.update(self._tasks[name], completed=done, total=total)

    def tell(self, sentence: str) -> None:
        """Print a line above the bars."""
        say(self._shown.console, sentence)


@contextmanager
def bars() -> Iterator[Bars]:
    """Progress bars that vanish at the end; without a terminal only the sentences appear."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as shown:
        yield Bars(shown)


OTHER_ADDRESS_FILE = "Choose another --address-file."


@contextmanager
def writing(file: Path, advice: str) -> Iterator[None]:
    """Turns a failure to write `file` into a `StateError` that ends with `advice`, or with what a full disk needs."""
    try:
        yield
    except OSError as error:
        told = advice_for(error, advice.removesuffix("."))
        raise StateError(f"Cannot write {file} ({error.strerror}). {told}.") from None


def write_whole(file: Path, contents: str | bytes, advice: str, mode: int = FOR_OTHERS) -> None:
    """Write the file as a whole or, with a `StateError` that ends with `advice`, leave it as it was."""
    with writing(file, advice):
        written = contents.encode(errors="backslashreplace") if isinstance(contents, str) else contents
        replace_whole(file, written, mode=mode)


def require_places(*files: Path | None, advice: str) -> None:
    """Refuse, before long work, a file that could not be written after it. Raises `StateError`."""
    for file in files:
        if file is not None:
            with writing(file, advice):
                require_writable(file)


@contextmanager
def figure(file: Path, panels: int = 1) -> Iterator[Sequence[Axes]]:
    """The axes of a figure's panels, which is saved to `file` at the end as SVG, PNG or PDF.

    Raises `UserError` when the file cannot be written, its ending names no format, or matplotlib is missing.
    """
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"Cannot draw {file}: end its name in .svg, .png or .pdf.")
    optional("matplotlib", "plot").use("Agg")  # no display is needed
    plt = optional("matplotlib.pyplot", "plot")
    # a fixed salt and no date: the same data gives the same file
    with plt.rc_context({"svg.hashsalt": "noloco", "svg.fonttype": "none", "font.size": 9}):
        drawing, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 3.8), squeeze=False)
        for axis in axes[0]:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        try:
            yield axes[0]
            drawing.tight_layout()
            require_writable(file)
            drawn, kind = BytesIO(), file.suffix.removeprefix(".")
            drawing.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
            replace_whole(file, drawn.getvalue(), mode=FOR_OTHERS)
        except OSError as error:
            raise UserError(f"Cannot write {file} ({error.strerror}). Choose another file.") from None
        finally:
            plt.close(drawing)
